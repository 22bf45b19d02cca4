"""TRL's side of `vs_trl.py`: GRPOTrainer on the CPU learns a game of `examples/`; one line of JSON for each step.

Runs in an environment of its own (`requirements.txt`) with AgentJet's source on the path for the agent's imports only.
TRL generates (`GRPOTrainer._generate_single_turn`, what its tool loop uses for each turn) and trains; an episode is one
row, in which the mask leaves out what the environment said. `seconds` count from the first request for replies,
`cpu_seconds` are the whole process's.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from game import Episode, Game, load_agent
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

DTYPES = {"float32": (torch.float32, False), "autocast": (torch.float32, True), "bfloat16": (torch.bfloat16, False)}
"""Of the weights, and whether forward passes are autocast to bfloat16."""


class Player:
    """Plays the trainer's batches and remembers the last one."""

    def __init__(self, agent: Path, tokenizer: Any) -> None:
        self._agent, self._tokenizer = load_agent(agent), tokenizer
        self.started = 0.0
        self.generate_seconds = 0.0
        self.episodes: list[Episode] = []

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """TRL's `rollout_func`: a prompt is a task as JSON."""
        self.started = self.started or time.perf_counter()
        started = time.perf_counter()

        def generate(rows: list[list[int]]) -> list[list[int]]:
            return trainer._generate_single_turn(rows, None, {}, trainer.num_generations)[0]

        game = Game(self._agent, self._tokenizer, end_id=self._tokenizer.eos_token_id, generate=generate)
        self.episodes = game.play([json.loads(prompt) for prompt in prompts])
        self.generate_seconds = time.perf_counter() - started
        return {
            "prompt_ids": [episode.prompt_ids for episode in self.episodes],
            "completion_ids": [episode.completion_ids for episode in self.episodes],
            "env_mask": [episode.is_sampled for episode in self.episodes],
            "logprobs": None,
            "game_reward": [episode.outcome["reward"] for episode in self.episodes],
        }

    def figures(self) -> dict[str, float]:
        """Of the last batch."""
        metrics = [episode.outcome["metrics"] for episode in self.episodes]
        means = {name: sum(one[name] for one in metrics) / len(metrics) for name in metrics[0]}
        return {
            **means,
            "reward": sum(episode.outcome["reward"] for episode in self.episodes) / len(self.episodes),
            "trained_tokens": sum(sum(episode.is_sampled) for episode in self.episodes),
            "generate_seconds": round(self.generate_seconds, 3),
        }


def game_reward(game_reward: list[float], **_: Any) -> list[float]:
    """The agent's own."""
    return game_reward


class Report(TrainerCallback):
    """Says what each step took, and stops once enough replies are valid."""

    def __init__(self, player: Player, stop_at: float) -> None:
        self._player, self._stop_at = player, stop_at

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds, figures = time.perf_counter() - self._player.started, self._player.figures()
        times = {"seconds": round(seconds, 3), "cpu_seconds": round(time.process_time(), 3)}
        print(json.dumps({"step": state.global_step, **times, **figures}), flush=True)
        if figures["valid_ratio"] >= self._stop_at:
            control.should_training_stop = True


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    weights, is_autocast = DTYPES[args.dtype]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    player = Player(args.agent, tokenizer)
    batch = args.groups * args.members
    config = GRPOConfig(
        output_dir=str(args.dir),
        use_cpu=True,
        bf16=is_autocast,
        seed=args.seed,
        max_steps=args.updates,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=batch // args.micro_batch,
        num_generations=args.members,
        max_completion_length=args.max_tokens,
        temperature=args.temperature,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="grpo",
        shuffle_dataset=False,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=weights),
        processing_class=tokenizer,
        reward_funcs=game_reward,
        rollout_func=player,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": json.dumps(task)} for task in json.loads(args.tasks.read_text())]),
        callbacks=[Report(player, args.stop_at)],
    )
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--agent", type=Path, required=True, help="the agent's file")
    parser.add_argument("--tasks", type=Path, required=True, help="JSON list of tasks, in the order of the groups")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--temperature", type=float, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--stop-at", type=float, required=True, help="share of valid replies that ends the run")
    parser.add_argument("--dtype", choices=list(DTYPES), required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="rows of a forward pass")
    train(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
