"""Partial rollouts: what is not done at the end of a step goes on in the next, with new weights.

Source: Kimi team, Kimi k1.5, 2501.12599, §2.6.2.
"""

import asyncio
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

from ..mean import Metrics, scalar_mean
from ..models.decoder import Decoder
from ..types import KeyArray, Scalar
from .async_environment import AsyncEnvironment
from .asynchronous import episodes_of
from .collect import Episodes, Tasks
from .draw import Sampling
from .engine import Engine
from .environment import Outcome, as_earned
from .playing import Episode, Game, Name, Rules, Table, abandon, play, tickets
from .shared_engine import SharedEngine


@dataclass(frozen=True)
class Group:
    """The episodes of one task."""

    id: int
    born: int  # the step in which they began
    episodes: tuple[Episode, ...]

    @property
    def name(self) -> Name:
        """What no other has."""
        return self.episodes[0].ticket.name

    @property
    def complete(self) -> bool:
        """Whether all are over."""
        return all(episode.script.finish is not None for episode in self.episodes)


@dataclass(frozen=True)
class Backlog:
    """What is carried from step to step, plain data: groups under way, the oldest first."""

    step: int = 0
    groups: tuple[Group, ...] = ()


@final
class PartialRollouts:
    """A collector (a `StatefulCollect`) of `groups` complete groups in each step, over the episodes
    of `asynchronous`.

    In a step all episodes go on that are under way, and those of its tasks begin. With `budget`
    each draws at most so many tokens in it, and nothing depends on how long anything takes. Without
    `deterministic` the step is over as soon as `groups` groups are complete; the others stop where
    they are, but for environments, which think on. The oldest complete groups come back, in order;
    where there are fewer the rest are empty episodes without a reward, of weight 0. What is left is
    carried on, but groups that would come back more than `max_staleness` steps old are dropped.

    Every token has the log-probability that it was drawn with, and the version of the policy that
    drew it; an episode's staleness is its oldest token's. Texts are computed again with new
    weights. An environment that was lost, with its process, is played again up to where it was: one
    that then answers otherwise has failed. Stop strings must not be split by a step's end: let
    turns end by stop ids. `close` when done. Errors: as `asynchronous`.
    """

    def __init__(
        self,
        engine: Engine,
        env: AsyncEnvironment,
        sampling: Sampling,
        *,
        group: int,
        groups: int,
        max_turns: int,
        max_tokens: int,
        budget: int | None = None,
        deterministic: bool = True,
        max_staleness: int | None = None,
        discount: Scalar = 1.0,
        outcome: Outcome = as_earned,
        turn_seconds: float | int | None = None,
        seconds: float | int | None = None,
        retries: int = 0,
    ) -> None:
        limits = (max_turns, max_tokens, float(discount), turn_seconds, seconds, retries)
        self.rules = Rules(env, sampling, group, *limits)
        self.rules.check(engine.limits.room)
        for name, n, least in (
            ("groups", groups, 1),
            ("budget", budget, 1),
            ("max_staleness", max_staleness, 0),
        ):
            if n is not None and n < least:
                raise ValueError(f"expected {name} ≥ {least}, got {n}")
        self.engine, self.outcome, self.groups = engine, outcome, groups
        self.budget, self.deterministic, self.max_staleness = budget, deterministic, max_staleness
        self._games: dict[Name, Game] = {}
        self._carried: Backlog | None = None  # to which these games belong
        self._runner = asyncio.Runner()  # environments go on thinking between steps

    def start(self) -> Backlog:
        """Nothing is under way."""
        return Backlog()

    def __call__(
        self, key: KeyArray, model: Decoder, tasks: Tasks, carried: Backlog
    ) -> tuple[Episodes, Metrics, Backlog]:
        """Go on with what is under way, and begin the tasks."""
        self.engine.follow(model)
        step, size = carried.step, self.rules.group
        groups = [_copied(group) for group in carried.groups]
        known, self._carried = self._carried, None  # if this fails, the games are nobody's
        if carried is not known:
            self._let_go(self._games)
            # Environments that are played again are to be there when others draw.
            self._runner.run(self._go_on(groups, step, 0))
        new = [Episode(ticket) for ticket in tickets(key, tasks, size, collection=step)]
        for i, id in enumerate(tasks.prompts.ids.tolist()):
            groups.append(Group(id, step, tuple(new[i * size : (i + 1) * size])))
        self._runner.run(self._go_on(groups, step, self.budget))
        done = [group for group in groups if group.complete][: self.groups]
        names = {group.name for group in done}
        left = [group for group in groups if group.name not in names]
        kept = [group for group in left if self._will_do(group, step + 1)]
        held = {episode.ticket.name for group in kept for episode in group.episodes}
        self._let_go(self._games.keys() - held)
        counts = {
            "carried": len(kept),
            "dropped": len(left) - len(kept),
            "filler": self.groups - len(done),
        }
        metrics = {f"partial/{name}": scalar_mean(float(n)) for name, n in counts.items()}
        episodes, more = episodes_of(
            [episode for group in done for episode in group.episodes],
            [group.id for group in done],
            self.rules,
            self.outcome,
            groups=self.groups,
            now=step,
        )
        self._carried = Backlog(step + 1, tuple(kept))
        return episodes, metrics | more, self._carried

    def close(self) -> None:
        """Let all environments go; what is carried can go on in another collector."""
        self._let_go(self._games)
        self._runner.close()

    async def _go_on(self, groups: Sequence[Group], step: int, budget: int | None) -> None:
        """Let all that is under way draw so many tokens each."""
        closing = asyncio.get_running_loop().create_future()
        shared = SharedEngine(self.engine)
        table = Table(shared, self.rules, step, budget, closing)
        under_way = {
            asyncio.ensure_future(
                play(episode, self._games.setdefault(episode.ticket.name, Game()), table)
            )
            for group in groups
            for episode in group.episodes
            if episode.script.finish is None
        }
        playing = under_way
        try:
            while playing and (
                self.deterministic or sum(group.complete for group in groups) < self.groups
            ):
                done, playing = await asyncio.wait(playing, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            closing.set_result(None)
            await shared.pause()
            await asyncio.gather(*playing)
        finally:
            await abandon(under_way, table)

    def _will_do(self, group: Group, step: int) -> bool:
        """Whether a group is fresh enough, should it come back in that step."""
        return self.max_staleness is None or step - group.born <= self.max_staleness

    def _let_go(self, names: Iterable[Name]) -> None:
        for name in list(names):
            self._games.pop(name).let_go(self.rules.env)


def _copied(group: Group) -> Group:
    """A group that can go on while this one stays as it is."""
    copied = (replace(e, script=copy.deepcopy(e.script)) for e in group.episodes)
    return replace(group, episodes=tuple(copied))
