"""AgentJet against TRL's GRPOTrainer on the CPU: the same model, agent, tasks, batch, learning rate and sampling.

Each side learns `examples/guess` until 80 % of the replies of a step are valid, or for `--updates` updates. TRL runs in
an environment of its own, made on first use, and plays the very same agent file through its `rollout_func` (see
`trl_match/`); AgentJet is a whole swarm: server, every actor in a process of its own, without evaluations. Each takes
all cores. `single` is the same game with one guess. For every seed:

- `seconds_per_step`: over the steps that both took, from the first request for a reply; generation is in it.
- `trained_tokens_per_second`: sampled tokens that are in the loss, over the same time.
- `cpu_seconds_per_step`: processor time of all processes, over the same steps without the first; on a shared machine
  it says more than a clock.
- `seconds_to_valid`: to the end of the first step whose replies are 80 % valid; `whole_seconds_to_valid` from the start
  of the processes; `cpu_seconds_to_valid`: processor time, start-up included.

Ratios are TRL over AgentJet (AgentJet over TRL for tokens per second): the median of the seeds' ratios. Before that TRL
takes one update with each dtype and micro-batch (`trl_ways`); it learns in the fastest way of those that keep float32
weights, as AgentJet does. With bfloat16 weights 98 % of the model's weights are so coarse that an AdamW update of 1e-5
rounds to nothing. Beside the figures stands a proof that both play one game (`replayed_alike`): AgentJet's first
episodes are replayed on TRL's side with the replies they got; it has to come to the same prompts, token by token, and
the same rewards.

`python benchmarks/vs_trl.py --json [--seeds 3] [--updates 30] [--games multi single]`
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trl_match import environment
from trl_match.agentjet_side import play_agentjet
from trl_match.figures import Pair, summary
from trl_match.match import GROUPS, GUESSES, LEARNING_RATE, MAX_TOKENS, MEMBERS, TEMPERATURE, Match
from trl_match.trl_side import WAYS, Way, play_trl

from agentjet.pretrained.model_file import PRESETS, fetch
from chaos import machine


async def try_ways(match: Match) -> dict[Way, float]:
    """TRL's seconds for one update in each way."""
    seconds: dict[Way, float] = {}
    for way in WAYS:
        (step,) = await play_trl(match, way)
        seconds[way] = round(step.seconds, 2)
        _say(f"TRL, {way.dtype}, {way.rows} rows: {seconds[way]:.1f} s for an update")
    return seconds


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One line of figures."""
    started, model = time.monotonic(), await asyncio.to_thread(fetch, args.model)
    await asyncio.to_thread(environment.python)
    installed = time.monotonic()
    by_way = await try_ways(Match(args.games[0], 0, 1, folder / "ways", model))
    best = min((way for way in WAYS if way.learns), key=lambda way: by_way[way])
    pairs: dict[str, list[Pair]] = {game: [] for game in args.games}
    num_alike = 0
    for seed in range(1, args.seeds + 1):
        for game in args.games:
            match = Match(game, seed, args.updates, folder / f"{game}-{seed}", model)
            if seed % 2:
                trl = await play_trl(match, best)
                ours, alike = await play_agentjet(match)
            else:
                ours, alike = await play_agentjet(match)
                trl = await play_trl(match, best)
            num_alike += alike
            pairs[game].append(Pair(trl, ours))
            _say(f"{game} seed {seed}: TRL {trl[-1].seconds:.0f} s, AgentJet {ours[-1].seconds:.0f} s")
    return {
        "games": {game: summary(of_game) for game, of_game in pairs.items()},
        "trl_way": best._asdict(),
        "trl_ways": [{**way._asdict(), "seconds": seconds} for way, seconds in by_way.items()],
        "replayed_alike": num_alike,
        "model": args.model,
        "groups": GROUPS,
        "members": MEMBERS,
        "learning_rate": LEARNING_RATE,
        "temperature": TEMPERATURE,
        "max_tokens": MAX_TOKENS,
        "updates": args.updates,
        "seeds": args.seeds,
        "install_seconds": round(installed - started, 1),
        "total_seconds": round(time.monotonic() - started, 1),
        "machine": machine(),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=30, help="most updates of each side")
    parser.add_argument("--games", nargs="*", default=["multi"], choices=list(GUESSES))
    parser.add_argument("--model", choices=list(PRESETS), default="smollm2-135m")
    parser.add_argument("--dir", type=Path, default=None, help="folder of the runs, which are kept")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of a table")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentjet-vs-trl-")))
        result = asyncio.run(measure(args, folder.absolute()))
    print(json.dumps(result) if args.json else "\n".join(f"{key:30} {value}" for key, value in result.items()))


if __name__ == "__main__":
    main()
