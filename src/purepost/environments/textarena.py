"""Games of TextArena: those of one player, and those of two against an opponent that is given."""

import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

Opponent = Callable[[str], str]  # all that it has been shown → its move


class TextArena:
    """A game by its id, such as "GuessTheNumber-v0"; `options` are the game's own.

    Of two players the policy is player `seat`, 0 or 1, and `opponent` is the other. Rewards come at
    the end. The games draw from Python's global generator: its state is each episode's own while a
    call is made, so that an episode depends on its seed alone.
    """

    generator: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, game: str, *, opponent: Opponent | None = None, seat: int = 0, **options: Any
    ) -> None:
        if not 0 <= seat < (1 if opponent is None else 2):
            raise ValueError(f"expected a seat below the number of players, got {seat}")
        self.game = game
        self.opponent = opponent
        self.seat = seat
        self.options = options
        self.env: Any = None
        self.state: Any = None
        self.seen = ""  # by the opponent

    def reset(self, task: dict[str, Any], seed: int) -> str:
        """The rules, and the opponent's move if it is the first."""
        self.state, self.seen = random.Random(seed).getstate(), ""
        self.env = self._call(lambda: _library().make(f"{self.game}-raw", **self.options))
        players = 1 if self.opponent is None else 2
        self._call(lambda: self.env.reset(num_players=players, seed=seed))
        text, _, done = self._until_seat(False)
        if done:
            raise RuntimeError(f"{self.game} ended before the policy's first turn")
        return text

    def step(self, action: str) -> tuple[str, float, bool]:
        """What is seen on the next turn, or the reward at the end."""
        done, _ = self._call(lambda: self.env.step(action))
        return self._until_seat(done)

    def _until_seat(self, done: bool) -> tuple[str, float, bool]:
        """Have the opponent play until it is the policy's turn, or all is over."""
        while not done:
            player, news = self._call(lambda: self.env.get_observation())
            if player == self.seat or self.opponent is None:
                # The policy's own moves stand in the dialogue already.
                lines = [_line(who, text) for who, text, *_ in news if who != self.seat]
                return "\n".join(lines), 0.0, False
            self.seen += "".join(f"{_line(who, text)}\n" for who, text, *_ in news)
            move = self.opponent(self.seen)
            done, _ = self._call(lambda move=move: self.env.step(move))
        rewards, _ = self._call(lambda: self.env.close())
        return "", float(rewards[self.seat]), True

    def _call(self, function: Callable[[], Any]) -> Any:
        """A call that draws from this episode's random numbers."""
        with self.generator:
            before = random.getstate()
            random.setstate(self.state)
            try:
                return function()
            finally:
                self.state = random.getstate()
                random.setstate(before)


def _line(sender: Any, text: str) -> str:
    """What a player said, or the game itself."""
    return f"[Player {sender}] {text}" if sender in (0, 1) else text


def _library() -> Any:
    try:
        import textarena
    except ImportError as error:
        raise ImportError(
            "these games need TextArena: pip install 'purepost[textarena]'"
        ) from error
    return textarena
