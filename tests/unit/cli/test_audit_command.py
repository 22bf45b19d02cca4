"""How `agentjet audit` explains its differences."""

from dataclasses import replace

from agentjet.accounting.audit import AuditReport, Difference
from agentjet.cli.audit import lines

WHOLE = AuditReport(
    groups=110,
    issued=880,
    ended=880,
    scored=880,
    failed=0,
    sampled=880,
    sampled_slots=880,
    settled=880,
    trained=880,
    dropped=0,
    evaluated=0,
    reoffered=0,
    buried=0,
    untrained=0,
    lost=0,
    duplicated=0,
    issued_not_ended=Difference(),
    ended_not_scored=Difference(),
    unjudged=0,
    scored_not_sampled=Difference(),
    sampled_not_settled=Difference(),
    states={},
    problems=(),
)


def test_nothing_is_explained_where_nothing_differs():
    assert lines(WHOLE) == [
        "issued   880 tickets in 110 groups",
        "ended    880",
        "scored   880",
        "sampled  880 samples and tombstones",
        "settled  880 slots; 880 samples trained",
        "lost 0, duplicated 0",
    ]


def test_samples_of_several_models_are_told_from_slots():
    assert lines(replace(WHOLE, sampled=1760))[3] == "sampled  1760 samples and tombstones of 880 slots"


def test_every_difference_is_explained_in_words():
    report = replace(
        WHOLE,
        ended=875,
        scored=869,
        failed=4,
        sampled=820,
        sampled_slots=820,
        settled=800,
        trained=760,
        dropped=3,
        evaluated=49,
        reoffered=2,
        buried=3,
        untrained=30,
        lost=1,
        problems=("lost: m p-0.1",),
        issued_not_ended=Difference(5, "p-9.0.0", 12.34),
        ended_not_scored=Difference(2, "p-8.0.0", 3.0),
        scored_not_sampled=Difference(2, "m p-7.0", 90.0),
        sampled_not_settled=Difference(30, "m p-6.0", 1.0),
    )
    assert lines(report) == [
        "issued   880 tickets in 110 groups",
        "ended    875; 5 not ended yet, the oldest p-9.0.0 for 12.3 s; "
        "3 of them by the curriculum, as nobody ended them in time",
        "scored   869; 4 failed (2 played again, 2 dead); "
        "2 neither scored nor failed yet, the oldest p-8.0.0 for 3.0 s",
        "sampled  820 samples and tombstones; 2 not sampled yet, the oldest m p-7.0 for 0:01:30; "
        "49 of evaluations, which reach no learner; 2 played again instead",
        "settled  800 slots; 760 samples trained; 30 not settled yet, the oldest m p-6.0 for 1.0 s; "
        "30 not trained: of 3 dropped groups, or without a reward",
        "lost 1, duplicated 0",
        "! lost: m p-0.1",
    ]
