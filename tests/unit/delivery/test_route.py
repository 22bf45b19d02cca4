"""Which way leads to a version: from the file at hand, or from a whole one."""

from agentjet.delivery.route import Route, find_route
from agentjet.schemas.ids import RunId, Version
from agentjet.schemas.weights import Weights


def record(step: int, base: int | None = None, *, is_whole: bool = False, patch_bytes: int = 10) -> Weights:
    patch = {} if base is None else {"base": f"1-{base}", "patch_sha256": f"p{step}", "patch_bytes": patch_bytes}
    return Weights(
        run=RunId("r-abcdef"),
        model="m",
        version=f"1-{step}",
        ledger_sequence=step,
        dtype="bfloat16",
        num_bytes=1000,
        sha256=f"s{step}",
        is_blob=is_whole,
        **patch,
    )


def published(*records: Weights) -> dict[Version, Weights]:
    return {Version.parse(one.version): one for one in records}


def steps(route: Route | None) -> tuple[str, list[str]]:
    assert route is not None
    return route.whole.version if route.whole else "", [one.version for one in route.patches]


CHAIN = published(record(0, is_whole=True), record(1, 0), record(2, 1), record(3, 2, is_whole=True), record(4, 3))


def test_an_engine_that_follows_takes_one_patch():
    assert steps(find_route(Version(1, 4), CHAIN, {Version(1, 3)})) == ("", ["1-4"])


def test_an_engine_that_fell_behind_takes_several_patches_past_a_whole_file():
    assert steps(find_route(Version(1, 4), CHAIN, {Version(1, 0)})) == ("", ["1-1", "1-2", "1-3", "1-4"])


def test_of_several_files_at_hand_the_nearest_is_brought_forward():
    route = find_route(Version(1, 4), CHAIN, {Version(1, 0), Version(1, 2), Version(2, 0)})
    assert steps(route) == ("", ["1-3", "1-4"])
    assert route is not None
    assert (route.start, route.end) == (Version(1, 2), Version(1, 4))


def test_a_late_joiner_takes_the_newest_whole_file_and_the_patches_since():
    assert steps(find_route(Version(1, 4), CHAIN)) == ("1-3", ["1-4"])
    assert steps(find_route(Version(1, 3), CHAIN)) == ("1-3", [])


def test_many_large_patches_cost_more_than_a_whole_file():
    chain = published(
        record(0, is_whole=True), *(record(step, step - 1, is_whole=step == 3, patch_bytes=600) for step in (1, 2, 3))
    )
    assert steps(find_route(Version(1, 3), chain, {Version(1, 1)})) == ("1-3", [])
    assert steps(find_route(Version(1, 3), chain, {Version(1, 2)})) == ("", ["1-3"])


def test_a_version_without_a_patch_may_come_to_the_bus_late():
    chain = published(record(5), record(6, 5))
    assert steps(find_route(Version(1, 6), chain)) == ("1-5", ["1-6"])


def test_records_that_are_missing_or_name_a_later_base_lead_nowhere():
    assert find_route(Version(1, 9), CHAIN) is None
    assert find_route(Version(1, 2), published(record(2, 1)), {Version(1, 0)}) is None
    assert find_route(Version(1, 2), published(record(2, 2))) is None


def test_a_route_names_the_records_it_needs():
    route = find_route(Version(1, 4), CHAIN)
    assert route is not None
    assert route.versions == {Version(1, 3), Version(1, 4)}
    assert route.num_bytes == 1010
