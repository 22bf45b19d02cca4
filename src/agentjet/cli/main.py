"""`agentjet`: the table of commands and what becomes of their errors.

Invariants:

- Commands are import strings: `agentjet --help` loads none of them, and no torch.
- Exit codes: 0 done; 1 an error that one sentence on stderr explains; 2 wrong usage; 130 interrupted. A traceback
  appears only with `--debug`, or when the error is a defect of AgentJet.
"""

import difflib
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, Parameter, UnknownCommandError

from agentjet.errors import AgentJetError

DEBUG_FLAG = "--debug"
_COMMANDS = {
    "up": ("agentjet.cli.up:up", "Start a whole swarm on this machine and supervise it."),
    "demo": ("agentjet.cli.demo:demo", "Train a small chat model on a game, from nothing to a report."),
    "rollout": ("agentjet.cli.rollout:rollout", "Play episodes; with --once --dry-run, one to look at."),
    "status": ("agentjet.cli.status:status", "What runs, what each part waits for, how full the streams are."),
    "audit": ("agentjet.cli.audit:audit", "Whether every issued episode is accounted for, exactly once."),
    "replay": ("agentjet.cli.replay:replay", "Derive a run's steps again from its log, bit for bit."),
    "eval": ("agentjet.cli.evaluate:evaluate", "Evaluate a checkpoint or model on the [eval] pool."),
    "decode": ("agentjet.cli.decode:decode", "Print a record of the bus as JSON."),
    "doctor": ("agentjet.cli.doctor:doctor", "Check this machine and say what to do."),
}
_GROUPS = {
    "config": (
        "Show and check swarm.toml.",
        {
            "show": ("agentjet.cli.config:show", "Every setting, and where its value comes from."),
            "check": ("agentjet.cli.config:check", "Whether the configuration is valid."),
        },
    ),
    "model": (
        "Models on this machine.",
        {
            "fetch": ("agentjet.cli.model:fetch", "Bring a model onto this machine."),
            "ls": ("agentjet.cli.model:ls", "Models known by name, and where they lie."),
        },
    ),
    "checkpoint": (
        "Saved states of learners.",
        {
            "ls": ("agentjet.cli.checkpoint:ls", "List the checkpoints of a run."),
            "verify": ("agentjet.cli.checkpoint:verify", "Read every byte and compare digests."),
            "export": ("agentjet.cli.checkpoint:export", "Write a model in the Hugging Face format."),
        },
    ),
    "dead": (
        "Episodes that got no reward.",
        {
            "ls": ("agentjet.cli.dead:ls", "List the slots that died, and why."),
            "show": ("agentjet.cli.dead:show", "Every offer of a slot: claims, ends, faults."),
            "retry": ("agentjet.cli.dead:retry", "Play a dead group's task once more."),
        },
    ),
    "runs": (
        "Runs on a server.",
        {
            "ls": ("agentjet.cli.runs:ls", "List the runs whose streams a server holds."),
            "rm": ("agentjet.cli.runs:rm", "Delete a run's streams from the server."),
        },
    ),
}


def build_app() -> App:
    """The table of commands."""
    app = App(
        name="agentjet",
        help="Swarm reinforcement learning of the language models behind agents.",
        help_epilogue="Every command takes `--debug`, which shows tracebacks.",
        help_format="plaintext",
        version=_version,
        default_parameter=Parameter(negative=(), show_default=_shown_default),
        suppress_keyboard_interrupt=False,
    )
    for name, (target, text) in _COMMANDS.items():
        app.command(target, name=name, help=text)
    for group, (about, commands) in _GROUPS.items():
        table = App(name=group, help=about)
        for name, (target, text) in commands.items():
            table.command(target, name=name, help=text)
        app.command(table)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run a command and return its exit code; errors are printed as the module's docstring says."""
    words, is_debug = _without_debug(argv)
    if words and not words[0].startswith("-"):
        # Standard output belongs to what was asked for; what the library logs goes to standard error.
        from agentjet.observe.log import configure

        configure(actor="agentjet", level="debug" if is_debug else "warning")
    try:
        result = build_app()(words, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
    except UnknownCommandError:  # its own text would import every command
        return _complain(_unknown_command(words), 2)
    except CycloptsError as error:
        if is_debug:
            raise
        return _complain(f"{str(error).rstrip('.')}; see `agentjet {_help_words(words)}--help`", 2)
    except AgentJetError as error:
        if is_debug:
            raise
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, for example `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return result if isinstance(result, int) else 0


def _without_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    ours = list(argv[: argv.index("--")] if "--" in argv else argv)
    rest = list(argv[len(ours) :])
    return [word for word in ours if word != DEBUG_FLAG] + rest, DEBUG_FLAG in ours


def _unknown_command(words: Sequence[str]) -> str:
    group = f"{words[0]} " if words[0] in _GROUPS else ""
    word = words[1] if group else words[0]
    known = list(_GROUPS[words[0]][1]) if group else [*_COMMANDS, *_GROUPS]
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean `{group}{near[0]}`?" if near else f"there are {', '.join(known)}"
    return f"there is no {'option' if word.startswith('-') else 'command'} `{group}{word}`; {hint}"


def _help_words(words: Sequence[str]) -> str:
    """The command that was meant, as far as it is known, for a hint."""
    if not words or words[0] not in {*_COMMANDS, *_GROUPS}:
        return ""
    if words[0] in _GROUPS and len(words) > 1 and words[1] in _GROUPS[words[0]][1]:
        return f"{words[0]} {words[1]} "
    return f"{words[0]} "


def _complain(sentence: str, code: int) -> int:
    sys.stderr.write(f"agentjet: {' '.join(sentence.split())}\n")
    return code


def _shown_default(value: object) -> str | None:
    """Defaults that say something: not the empty ones."""
    return str(value) if value or (isinstance(value, int) and not isinstance(value, bool)) else None


def _version() -> str:
    from importlib.metadata import version

    return version("agentjet")


if __name__ == "__main__":
    main()
