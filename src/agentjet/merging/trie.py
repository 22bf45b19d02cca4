"""A radix trie over token ids.

Invariants:

- Exact: two tokens share a place if and only if all tokens up to and including them are equal.
- The finished trie is a function of the set of sequences, never of the order in which they came.
- A node holds a run of tokens without a branch; its children begin with different tokens.

It does not know calls, samples or weights.
"""

from collections.abc import Sequence

from agentjet.schemas.sample import Segment

Place = tuple[int, int]
"""(segment, offset) of one token."""


class _Node:
    __slots__ = ("children", "ids", "index")

    def __init__(self, ids: tuple[int, ...], children: "dict[int, _Node]") -> None:
        self.ids = ids
        self.children = children
        self.index = -1


class TokenTrie:
    """Insert sequences, freeze once, then ask where their tokens stand."""

    def __init__(self) -> None:
        self._root = _Node((), {})
        self._segments: tuple[Segment, ...] | None = None
        self.num_tokens = 0
        """Unique tokens inserted so far."""

    def insert(self, ids: Sequence[int]) -> int:
        """Adds a sequence; returns how many of its tokens were new. RuntimeError once segments were numbered."""
        if self._segments is not None:
            raise RuntimeError("the trie is frozen: insert before segments or places are asked for")
        node, rest = self._root, tuple(ids)
        while (child := node.children.get(rest[0]) if rest else None) is not None:
            shared = common_length(child.ids, rest)
            rest = rest[shared:]
            if rest and shared < len(child.ids):
                _split(child, shared)
            node = child
        if not rest:
            return 0
        if node.children or node is self._root:
            node.children[rest[0]] = _Node(rest, {})
        else:
            # A leaf grows, so that a run is cut where it branches and nowhere else.
            node.ids += rest
        self.num_tokens += len(rest)
        return len(rest)

    def count_new(self, ids: Sequence[int]) -> int:
        """How many tokens of a sequence the trie lacks; changes nothing."""
        node, rest = self._root, tuple(ids)
        while rest and (child := node.children.get(rest[0])) is not None:
            shared = common_length(child.ids, rest)
            rest = rest[shared:]
            if shared < len(child.ids):
                break
            node = child
        return len(rest)

    def segments(self) -> tuple[Segment, ...]:
        """Numbers the runs in preorder, children by their first token, and freezes the trie."""
        if self._segments is None:
            found: list[Segment] = []
            stack = [(child, -1) for child in _ordered(self._root)]
            while stack:
                node, parent = stack.pop()
                node.index = len(found)
                found.append(Segment.model_construct(parent=parent, ids=node.ids))
                stack.extend((child, node.index) for child in _ordered(node))
            self._segments = tuple(found)
        return self._segments

    def places(self, ids: Sequence[int]) -> list[Place]:
        """Where each token of an inserted sequence stands. KeyError when it was never inserted."""
        self.segments()
        found: list[Place] = []
        node, rest = self._root, tuple(ids)
        while rest:
            node = node.children[rest[0]]
            length = min(len(node.ids), len(rest))
            if node.ids[:length] != rest[:length]:
                raise KeyError("the sequence was never inserted")
            found.extend((node.index, offset) for offset in range(length))
            rest = rest[length:]
        return found


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of leading tokens that agree."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(index for index in range(length) if left[index] != right[index])


def num_leaves(segments: Sequence[Segment]) -> int:
    """Segments that nothing continues."""
    return len(segments) - len({segment.parent for segment in segments if segment.parent >= 0})


def ancestry(segments: Sequence[Segment], index: int) -> list[int]:
    """The segments from the root down to `index`."""
    line: list[int] = []
    while index >= 0:
        line.append(index)
        index = segments[index].parent
    return line[::-1]


def leaf_paths(segments: Sequence[Segment]) -> list[tuple[int, ...]]:
    """The whole token sequence of every leaf, in the order of the leaves' segments."""
    inner = {segment.parent for segment in segments}
    paths: list[tuple[int, ...]] = []
    for index, segment in enumerate(segments):
        if index in inner:
            continue
        runs = [segment.ids]
        while segment.parent >= 0:
            segment = segments[segment.parent]
            runs.append(segment.ids)
        paths.append(tuple(token for run in reversed(runs) for token in run))
    return paths


def _ordered(node: _Node) -> list[_Node]:
    # Largest first token first: the stack hands them out from the end.
    return [node.children[token] for token in sorted(node.children, reverse=True)]


def _split(node: _Node, length: int) -> None:
    tail = _Node(node.ids[length:], node.children)
    node.children = {tail.ids[0]: tail}
    node.ids = node.ids[:length]
