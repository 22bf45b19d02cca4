"""Every subject and stream name, built here only.

Subjects are `aj.<run>.<kind>...`; streams are `AJ_<run>_<STREAM>`. Ticket ids hold dots, so they take three tokens.
"""

from enum import StrEnum

from agentjet.schemas.ids import CallId, GroupId, RunId, SlotId, TicketId


class Stream(StrEnum):
    """The streams of a run (DESIGN: who writes and who reads)."""

    TASKS = "TASKS"
    """Work queue of tickets; curriculum to rollouts."""
    CLAIMS = "CLAIMS"
    """Who plays a ticket; the claim service to inference."""
    INFER = "INFER"
    """Work queue of questions; gateways to engines."""
    CALLS = "CALLS"
    """Every generation; inference to the merger."""
    EPISODES = "EPISODES"
    """Ends; rollouts and curriculum to reward."""
    JUDGEMENTS = "JUDGEMENTS"
    """Group verdicts; reward."""
    SCORES = "SCORES"
    """Outcomes; reward to merger and curriculum."""
    SAMPLES = "SAMPLES"
    """Trees and tombstones; merger to learners."""
    LEDGER = "LEDGER"
    """Decisions of learners and curriculum."""
    WEIGHTS = "WEIGHTS"
    """Versions; learners to engines."""
    CHECKPOINTS = "CHECKPOINTS"
    """Verified checkpoints."""
    EVENTS = "EVENTS"
    """What happened, with age."""


def stream_name(run: RunId, stream: Stream) -> str:
    """`AJ_<run>_<STREAM>`."""
    return f"AJ_{run}_{stream.value}"


def stream_prefix(run: RunId | None = None) -> str:
    """What the stream names of a run (or of all runs) begin with."""
    return "AJ_" if run is None else f"AJ_{run}_"


_KINDS: dict[Stream, tuple[str, ...]] = {
    Stream.TASKS: ("task",),
    Stream.CLAIMS: ("claim",),
    Stream.INFER: ("infer", "blob.infer"),
    Stream.CALLS: ("call", "blob.call"),
    Stream.EPISODES: ("episode", "blob.episode"),
    Stream.JUDGEMENTS: ("judgement",),
    Stream.SCORES: ("score",),
    Stream.SAMPLES: ("sample", "blob.sample"),
    Stream.LEDGER: ("ledger",),
    Stream.WEIGHTS: ("weights", "blob.weights"),
    Stream.CHECKPOINTS: ("checkpoint",),
    Stream.EVENTS: ("event",),
}


def stream_subjects(run: RunId, stream: Stream) -> tuple[str, ...]:
    """The wildcards that a stream stores."""
    return tuple(f"aj.{run}.{kind}.>" for kind in _KINDS[stream])


def presence_bucket(run: RunId) -> str:
    """Name of the KV bucket of heartbeats."""
    return f"AJ_{run}_presence"


def task(run: RunId, pool: str, ticket: TicketId) -> str:
    """TASKS: a ticket."""
    return f"aj.{run}.task.{pool}.{ticket}"


def tasks_of(run: RunId, pool: str) -> str:
    """TASKS: the wildcard of a pool."""
    return f"aj.{run}.task.{pool}.>"


def claim(run: RunId, ticket: TicketId) -> str:
    """CLAIMS: the claims of a ticket."""
    return f"aj.{run}.claim.{ticket}"


ANY_ENGINE = "any"
"""Where questions wait that any engine may take; no engine may have this name."""


def infer(run: RunId, model: str, engine: str = ANY_ENGINE) -> str:
    """INFER: questions to a model, to any engine or to one."""
    return f"aj.{run}.infer.{model}.{engine}"


def call(run: RunId, model: str, ticket: TicketId, attempt: int, call_id: CallId) -> str:
    """CALLS: one generation."""
    return f"aj.{run}.call.{model}.{ticket}.{attempt}.{call_id}"


def calls_of(run: RunId, ticket: TicketId, attempt: int | None = None, model: str = "*") -> str:
    """CALLS: the wildcard of a ticket (or of one attempt)."""
    return f"aj.{run}.call.{model}.{ticket}.{'*' if attempt is None else attempt}.*"


def episode(run: RunId, ticket: TicketId) -> str:
    """EPISODES: the end of a ticket."""
    return f"aj.{run}.episode.{ticket}"


def episodes_of(run: RunId, group: GroupId) -> str:
    """EPISODES: the wildcard of a group's ends, of every member and offer."""
    return f"aj.{run}.episode.{group}.*.*"


def judgement(run: RunId, group: GroupId) -> str:
    """JUDGEMENTS: the verdict on a group."""
    return f"aj.{run}.judgement.{group}"


def score(run: RunId, ticket: TicketId) -> str:
    """SCORES: the outcome of a ticket."""
    return f"aj.{run}.score.{ticket}"


def sample(run: RunId, model: str, slot: SlotId) -> str:
    """SAMPLES: a slot's sample or tombstone."""
    return f"aj.{run}.sample.{model}.{slot}"


def samples_of(run: RunId, model: str) -> str:
    """SAMPLES: the wildcard of a model."""
    return f"aj.{run}.sample.{model}.>"


CURRICULUM = "curriculum"
"""The ledger subject of the curriculum; no model may have this name."""


def ledger(run: RunId, who: str) -> str:
    """LEDGER: the chain of a model's learner, or of the curriculum."""
    return f"aj.{run}.ledger.{who}"


def weights(run: RunId, model: str, version: str) -> str:
    """WEIGHTS: a version."""
    return f"aj.{run}.weights.{model}.{version}"


def weights_of(run: RunId, model: str) -> str:
    """WEIGHTS: the wildcard of a model's versions."""
    return f"aj.{run}.weights.{model}.*"


def checkpoint(run: RunId, model: str, version: str) -> str:
    """CHECKPOINTS: a verified checkpoint."""
    return f"aj.{run}.checkpoint.{model}.{version}"


def checkpoints_of(run: RunId, model: str) -> str:
    """CHECKPOINTS: the wildcard of a model."""
    return f"aj.{run}.checkpoint.{model}.*"


def blob(run: RunId, kind: str) -> str:
    """Prefix of blob chunks: `aj.<run>.blob.<kind>`; kinds are call, episode, infer, sample, weights."""
    return f"aj.{run}.blob.{kind}"


def event(run: RunId, actor: str, kind: str) -> str:
    """EVENTS: something happened."""
    return f"aj.{run}.event.{actor}.{kind}"


def claim_service(run: RunId) -> str:
    """Request subject of the claim service (ClaimRequest to ClaimGrant)."""
    return f"aj.{run}.rpc.claim"


def authorize_service(run: RunId) -> str:
    """Request subject of key checks (AuthorizeRequest to Authorization)."""
    return f"aj.{run}.rpc.authorize"


def retry_service(run: RunId) -> str:
    """Request subject for groups with dead slots (RetryRequest to RetryReply)."""
    return f"aj.{run}.rpc.retry"


def engine_service(run: RunId, model: str, engine: str) -> str:
    """Request subject of one engine (RoomRequest to RoomGrant)."""
    return f"aj.{run}.rpc.engine.{model}.{engine}"


def offer_service(run: RunId, pool: str) -> str:
    """Request subject for a client's own tasks (OfferRequest to OfferReply)."""
    return f"aj.{run}.offer.{pool}"


def cancel(run: RunId, call_id: CallId) -> str:
    """Plain subject: the caller of a call went away."""
    return f"aj.{run}.cancel.{call_id}"


def cancels_of(run: RunId) -> str:
    """Wildcard of cancellations."""
    return f"aj.{run}.cancel.*"
