"""Questions about islands that do not exist, to be answered by searching their encyclopaedia.

No model knows what the articles say, so a right answer was looked up. A question takes one look-up,
or two, where the answer to the first is what the second is about.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..data.order import shuffled
from ..data.records import Records, read
from ..tools.formats import hermes
from ..tools.functions import Toolbox, tool
from ..tools.messages import Parse
from .tool_use import ToolUse

# What an article tells → how one asks for it, and how one speaks of it where it has an article too.
RELATIONS: Mapping[str, tuple[str, str | None]] = {
    "architect": ("Who designed {}?", "the architect of {}"),
    "author": ("Who wrote {}?", "the author of {}"),
    "birthplace": ("In which town was {} born?", "the birthplace of {}"),
    "born": ("In which year was {} born?", None),
    "capital": ("What is the chief town of {}?", "the chief town of {}"),
    "captain": ("Who was the first captain of {}?", "the first captain of {}"),
    "completed": ("In which year was {} completed?", None),
    "craft": ("What product is {} known for?", None),
    "describer": ("Who first described {}?", "the person who first described {}"),
    "dish": ("What dish is eaten at {}?", None),
    "founded": ("In which year was {} founded?", None),
    "founder": ("Who founded {}?", "the founder of {}"),
    "habitat": ("On which island is {} found?", "the island on which {} is found"),
    "hill": ("What is the highest hill of {}?", None),
    "host": ("In which town is {} held?", "the town that holds {}"),
    "island": ("On which island is {}?", "the island of {}"),
    "launched": ("In which year was {} launched?", None),
    "month": ("In which month is {} held?", None),
    "profession": ("What was the profession of {}?", None),
    "published": ("In which year was {} published?", None),
    "shipyard": ("In which town was {} built?", "the town where {} was built"),
    "teacher": ("Whose pupil was {}?", "the teacher of {}"),
    "town": ("In which town does {} stand?", "the town where {} stands"),
}
PROMPT = (
    "{} Search the encyclopaedia of the Ledra Isles, then answer with the name, the word or the "
    "number alone."
)


@dataclass(frozen=True)
class Article:
    """An entry of the encyclopaedia; `facts` is what its text says, by `RELATIONS`."""

    title: str
    text: str
    facts: Mapping[str, str]


@cache
def encyclopaedia() -> tuple[Article, ...]:
    """All articles; the order is that of the file."""
    path = files("purepost.environments") / "encyclopaedia.jsonl"
    return tuple(Article(**record) for record in read(str(path)))


class Index:
    """Ranks texts by BM25: over the different words w of a query, of which n_w of N texts have one,

    score(d) = Σ_w ln(1 + (N − n_w + ½) / (n_w + ½)) · f_wd / (f_wd + k₁ (1 − b + b |d| / mean |d|))

    Source: Robertson & Zaragoza, The probabilistic relevance framework: BM25 and beyond, 2009,
    §3.4; with 1 + in the logarithm, so that no word counts against a text.
    """

    def __init__(self, texts: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        if not texts:
            raise ValueError("expected texts to search, got none")
        counts = [Counter(words(text)) for text in texts]
        mean = sum(c.total() for c in counts) / len(texts) or 1.0
        having = Counter(word for c in counts for word in c)
        self.weights: dict[str, dict[int, float]] = {word: {} for word in having}
        for i, count in enumerate(counts):
            usual = k1 * (1 - b + b * count.total() / mean)
            for word, f in count.items():
                rarity = math.log1p((len(texts) - having[word] + 0.5) / (having[word] + 0.5))
                self.weights[word][i] = rarity * f / (f + usual)

    def search(self, query: str, most: int) -> list[int]:
        """The best texts, best first; of equals the earlier. Those without a word are left out."""
        scores: dict[int, float] = {}
        for word in dict.fromkeys(words(query)):
            for i, weight in self.weights.get(word, {}).items():
                scores[i] = scores.get(i, 0.0) + weight
        return sorted(scores, key=lambda i: (-scores[i], i))[:most]


def words(text: str) -> list[str]:
    """The words and numbers of a text, in small letters."""
    return re.findall(r"\w+", text.lower().replace("'", ""))


def search_tools(results: int = 3) -> Toolbox:
    """A tool `search(query)` that shows the `results` articles that fit best."""
    if results < 1:
        raise ValueError(f"expected at least one result of a search, got {results}")
    articles = encyclopaedia()
    index = Index([f"{a.title} {a.text}" for a in articles])

    def search(query: str) -> str:
        """Search the encyclopaedia of the Ledra Isles; the articles that fit best."""
        found = [articles[i] for i in index.search(query, results)]
        return "\n\n".join(f"{a.title}: {a.text}" for a in found) or "nothing found"

    return Toolbox((tool(search),))


def retrieval(*, parse: Parse = hermes, results: int = 3) -> ToolUse:
    """The game: `search` as often as wanted, then an answer, which ends it; 1 if it is right.

    The tasks are `questions`; the schemas for the chat template are `search_tools().schemas`.
    """
    return ToolUse(search_tools(results), parse, exact_match)


def questions(*, seed: int, hops: Sequence[int] = (1, 2)) -> Records:
    """Every question of so many look-ups, in an order that the seed decides.

    Columns: prompt, answer, and titles, those of the articles that say it, in turn.
    """
    if not hops or not set(hops) <= {1, 2}:
        raise ValueError(f"expected questions of 1 or 2 look-ups, got {tuple(hops)}")
    facts = {article.title: article.facts for article in encyclopaedia()}
    rows: list[dict[str, Any]] = []
    for title, told in facts.items():
        for relation, value in told.items():
            question, phrase = RELATIONS[relation]
            if 1 in hops:
                rows.append(_row(question, _named(title), value, [title]))
            if 2 in hops and phrase is not None and value in facts:
                bridge = phrase.format(_named(title))
                rows += [
                    _row(RELATIONS[next_][0], bridge, answer, [title, value])
                    for next_, answer in facts[value].items()
                    if answer != title
                ]
    order = shuffled(len(rows), len(rows), seed=seed)(0).rows
    return read([rows[i] for i in order.tolist()])


def exact_match(task: Mapping[str, Any], answer: str) -> float:
    """1 if the answer is task["answer"], but for case, punctuation, articles and spaces; else 0.

    Source: Rajpurkar et al., SQuAD, 1606.05250, §6.1.
    """
    return float(_plain(answer) == _plain(task["answer"]))


def _plain(text: str) -> str:
    bare = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


def _row(question: str, about: str, answer: str, titles: list[str]) -> dict[str, Any]:
    return {"prompt": PROMPT.format(question.format(about)), "answer": answer, "titles": titles}


def _named(title: str) -> str:
    """A title within a sentence."""
    return f"the {title[4:]}" if title.startswith("The ") else title
