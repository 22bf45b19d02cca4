"""The one tree of errors, named after the boundary that was crossed.

Every error is also a standard library type, so that callers who know nothing of AgentJet can still catch it.
A message is one sentence that says what happened, where, and what to do next. The command line prints
`UserError` messages without a traceback and exits with `exit_code`; anything else is a defect and is shown whole.
"""


class AgentJetError(Exception):
    """Base of every error that AgentJet raises on purpose."""

    exit_code = 1


class UserError(AgentJetError):
    """Something the user can put right: input, configuration, credentials, space."""


class UsageError(UserError, ValueError):
    """A command was called with words it does not take."""

    exit_code = 2


class ConfigError(UserError, ValueError):
    """A configuration value is missing, misspelt or out of range."""


class MissingExtraError(UserError, ImportError):
    """A feature needs an optional dependency; the message names the extra."""


class ModelNotFoundError(UserError, FileNotFoundError):
    """A model's files are not where they were looked for."""


class TaskDataError(UserError, ValueError):
    """A task file has a broken line; the message names the line."""


class WorkflowError(UserError, ImportError):
    """The user's agent code can not be loaded; the message carries its own error."""


class RecordError(AgentJetError, ValueError):
    """A message on the wire is not a record of the expected schema."""


class RecordTooLargeError(RecordError):
    """A record exceeds the payload limit and may not be cut; it has to ride as a blob."""


class UnknownSchemaError(RecordError, UserError):
    """A record of a schema or major version that this process does not know: a delay and an alarm, never poison.

    An upgrade puts it right.
    """


class MergeError(RecordError):
    """The calls of an episode can not become a sample; the message names the call."""


class BusError(AgentJetError, ConnectionError):
    """The bus can not be reached or does not answer."""


class BusUnavailableError(BusError, UserError):
    """The NATS server can not be used at all: gone, too old, or refusing the credentials."""


class BusTimeoutError(BusError, TimeoutError):
    """The bus did not answer within the limit (a missing permission looks like this too)."""


class BusFullError(BusError):
    """A stream or the server's disk is full; nothing was stored."""


class ConflictError(BusError):
    """A create-only or compare-and-set publish found another record in its place."""

    def __init__(self, subject: str, expected_sequence: int) -> None:
        super().__init__(f"{subject}: another record is already stored (expected sequence {expected_sequence})")
        self.subject = subject
        self.expected_sequence = expected_sequence


class BlobError(BusError):
    """A blob is incomplete or its digest does not match."""


class PatchError(AgentJetError, ValueError):
    """A patch of weights is damaged, or not for the weights that it was to bring forward."""


FINAL_EXIT_CODE = 78
"""Exit code (sysexits' EX_CONFIG) of an actor that a supervisor must not start again."""
STOPPED_EXIT_CODE = 143
"""Exit code of an actor that a signal stopped in the middle of its work; shells say so of SIGTERM."""


class BroadcastError(AgentJetError, ConnectionError):
    """Weights did not come, or not arrive, by a broadcast; the bus brings them."""


class FencedError(AgentJetError):
    """A newer incarnation has taken over; this process must stop."""

    exit_code = FINAL_EXIT_CODE


class KeyRejectedError(AgentJetError, PermissionError):
    """A signed key is forged, damaged or expired."""


class ForeignKeyError(KeyRejectedError):
    """A signed key is for something else: another run, or another role."""


class SupersededError(AgentJetError):
    """An older attempt of a ticket tried to act after a newer claim or a stored end."""


class ModelNotServedError(AgentJetError, LookupError):
    """A model name that no engine serves; the message lists those that are served."""


class BadRequestError(AgentJetError, ValueError):
    """A request to a model that can not be honoured; the message names the field."""


class ContextLengthError(BadRequestError):
    """The prompt leaves no room for a token in the model's context."""


class EngineError(AgentJetError, RuntimeError):
    """An engine failed at a call; the call may be tried elsewhere."""


class EngineEndedError(EngineError):
    """An engine can serve no more; its calls belong to another, or to the one that is started in its place."""


class AbortError(AgentJetError):
    """The agent gives its episode up: it is re-offered, not scored. Agents raise it through `policy.abort(why)`."""


class RewardError(AgentJetError, RuntimeError):
    """The reward function raised, timed out or returned no number; the episode is invalid, never zero."""


class CallRewardError(UserError, ValueError):
    """Rewards of single calls do not fit the episode's calls; the message says which."""


class TrainingDivergedError(UserError, ArithmeticError):
    """Too many gradients in a row were not finite."""

    exit_code = FINAL_EXIT_CODE


class CheckpointError(UserError, OSError):
    """A checkpoint is missing, incomplete or damaged."""


class CheckpointDamagedError(CheckpointError):
    """A checkpoint's bytes are not those that were written: an older one has to do."""


class UnsupportedArchitectureError(UserError, NotImplementedError):
    """A model whose tree training or generation can not be done exactly here."""
