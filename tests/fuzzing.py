"""What the fuzz tests share: many cases, odd values, and what an answer to them may be."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

LONGEST_S = 5.0

DEEP: Any = "bottom"
for _ in range(60):
    DEEP = [DEEP] if len(str(DEEP)) % 2 else {"a": DEEP}

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 64, 2.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**63, 10**30,
    -(10**30), 10**400, "", " ", "x", "4096", "1e3", "nan", "llama", "../../x", "/etc/passwd.json",
    "é\u202e\u0000", "\ud800", "\x1b[2J", "a" * 1000, [], [1], [None], ["a", "a"], [[1, 2], [3]],
    [0] * 500, {}, {"a": 1}, {"": None}, {"value": 1}, {"text_config": {}}, DEEP,
]  # fmt: skip
"""JSON values that readers are not made for, or only in some places."""


def cases(count: int) -> settings:
    """That many cases, the same ones in every run."""
    return settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def odd_values() -> st.SearchStrategy:
    """Odd values, and numbers and texts of any kind."""
    numbers = st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False)
    return st.one_of(st.sampled_from(ODD), st.sampled_from(ODD), numbers, st.text(max_size=12))


ACTIONS = ["set", "set", "set", "drop", "scale", "wrap"]


def edits(keys: list[str], most: int = 4) -> st.SearchStrategy:
    """Changes of a mapping: (key, what to do, odd value), one to `most` of them."""
    change = st.tuples(st.sampled_from(keys), st.sampled_from(ACTIONS), odd_values())
    return st.lists(change, min_size=1, max_size=most)


seeds = st.integers(0, 2**32)
"""Of `random.Random`: what hypothesis draws piece by piece takes longer than most readers."""


def random_edits(rng: random.Random, keys: list[str], most: int = 4) -> list[tuple]:
    """As `edits` draws them, ten times as fast."""
    values = (
        *ODD,
        *ODD,
        rng.randint(-(2**40), 2**40),
        rng.uniform(-1e3, 1e3),
        10.0 ** -rng.random(),
    )
    return [
        (rng.choice(keys), rng.choice(ACTIONS), rng.choice(values))
        for _ in range(rng.randint(1, most))
    ]


def edited(content: Mapping[str, Any], changes: Any) -> dict[str, Any]:
    """A mapping with such changes; keys may be dotted paths."""
    result = dict(content)
    for path, action, value in changes:
        *folders, key = path.split(".")
        place = result
        for folder in folders:
            inner = place.get(folder)
            place[folder] = dict(inner) if isinstance(inner, Mapping) else {}
            place = place[folder]
        if action == "drop":
            place.pop(key, None)
        elif action == "wrap":
            place[key] = [place.get(key)]
        elif action == "scale" and type(place.get(key)) in (int, float) and abs(place[key]) < 1e300:
            place[key] = place[key] * random.Random(repr(value)).choice([-1, 3, 1e-9, 1000, 0.5])
        else:
            place[key] = value
    return result


def damaged(content: bytes, seed: int) -> bytes:
    """Bytes that were cut, flipped, doubled, or mixed with others."""
    rng = random.Random(seed)
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            del data[at:]
        elif kind == 1 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.choice([1, 2, 8, 300]))
        elif kind == 3:
            data[at:at] = data[at : at + rng.choice([1, 10, 200])]
        elif kind == 4:
            del data[at : at + rng.choice([1, 10, 200])]
        else:
            data[at : at + 1] = rng.choice([b"9" * 50, b'"', b"{", b"]", b",,", b"\x00", b"1e999"])
    return bytes(data)


def clear(message: str) -> None:
    """One sentence, or a few, that a person can read."""
    assert message.strip() and "\n" not in message and len(message) < 3000, message[:4000]
    assert message.rstrip().endswith((".", "?")), message
    assert all(letter.isprintable() for letter in message), repr(message)


def answered(call: Callable[[], Any]) -> Any:
    """The answer of a call, None where it refused in one clear sentence; either within 5 s."""
    begin = time.process_time()  # the machine may be busy with other things
    try:
        answer = call()
    except ValueError as error:
        assert type(error) is ValueError, repr(error)
        clear(str(error))
        answer = None
    assert time.process_time() - begin < LONGEST_S
    return answer


def finite(content: Any) -> None:
    """Every number of a JSON answer is finite."""
    if isinstance(content, Mapping):
        for value in content.values():
            finite(value)
    elif isinstance(content, list | tuple):
        for value in content:
            finite(value)
    elif isinstance(content, float):
        assert math.isfinite(content)
