"""The output of ``ringspan plan --generate``: the verdict, the devices, the cost and the reasons."""

from collections.abc import Iterator

from rich.text import Text

from ringspan.cli.console import console, facts, heading, paragraph
from ringspan.core.messages.units import shown_bytes, shown_seconds
from ringspan.plan.generation.planner import TextPlan


def show(answer: TextPlan, model: str) -> None:
    """Print a plan of generation for ``model``, as the user named it."""
    out, question, text, cost = console(), answer.question, answer.text, answer.cost
    has = shown_bytes(question.device.memory_bytes)
    verb = "of" if answer.fits else "needed, more than the"
    verdict = Text("fits: yes" if answer.fits else "fits: no", style="bold green" if answer.fits else "bold red")
    need = f"{shown_bytes(cost.peak_bytes)} {verb} {has} per device at the peak"
    out.print(verdict + Text(f", {need}", style="not bold"), soft_wrap=True)
    longest = f"{answer.max_prompt:,} tokens" if answer.max_prompt else "none, the weights are too large"
    paragraph(out, f"longest prompt that fits: {longest}")
    if answer.is_refused:
        asked = question.prompt + question.new_tokens
        paragraph(out, f"too long: {asked:,} tokens, the model has {answer.positions:,} positions", style="bold red")
    prompts = f"{question.batch:,} prompt{'s' * (question.batch > 1)} of {question.prompt:,} tokens"
    paragraph(
        out,
        f"asked: {question.shape.name} ({question.shape.parameters / 1e9:.3g}B parameters), {prompts} and "
        f"{question.new_tokens:,} new ones each, on {question.devices:,} x {question.device.title}",
    )
    if answer.alone_is_better and question.devices > 1:
        paragraph(out, "one device would be the better choice", style="bold")
    out.print()
    mesh = {"replicate": text.replicate, "ring": text.ring, "tp": text.tp}
    axes = " x ".join(f"{name} {size}" for name, size in mesh.items() if name == "ring" or size > 1)
    used = "" if text.devices == question.devices else f", {text.devices} of {question.devices} devices"
    weights = [("weights", f"{text.weights} on the ranks of a ring")] if text.ring > 1 else []
    facts(out, "how to run it", [("mesh", f"{axes}{used}"), *weights])
    facts(
        out,
        "memory per device at the peak",
        [
            ("weights", shown_bytes(cost.weight_bytes)),
            ("cache", shown_bytes(cost.cache_bytes)),
            ("a chunk of the prompt", shown_bytes(cost.work_bytes)),
            ("peak", f"{shown_bytes(cost.peak_bytes)} of {has}"),
        ],
    )
    facts(out, "time, at least", list(_times(answer)))
    heading(out, "why")
    for reason in answer.reasons():
        paragraph(out, reason, first="- ")
    if answer.fits and not answer.is_refused and not question.device.name.startswith("tpu"):
        out.print()
        paragraph(out, "to generate:", style="bold")
        out.print(Text(_command(answer, model) if question.batch == 1 else _call(answer)), soft_wrap=True)


def _times(answer: TextPlan) -> Iterator[tuple[str, str]]:
    cost, alone = answer.cost, answer.alone
    yield "to the first token", shown_seconds(cost.first_token_seconds)
    yield "per token after it", shown_seconds(cost.token_seconds)
    yield "in all", shown_seconds(cost.seconds)
    if answer.text.devices > 1:
        fits = "" if answer.alone_fits else ", if it held it"
        first, each = shown_seconds(alone.first_token_seconds), shown_seconds(alone.token_seconds)
        yield "on one device", f"{first}, then {each} per token{fits}"


def _command(answer: TextPlan, model: str) -> str:
    question, text = answer.question, answer.text
    options = f" --tp {text.tp}" if text.tp > 1 else ""
    options += f" --max-new-tokens {question.new_tokens} --dtype {text.dtype}"
    options += " --weights sharded" if text.weights == "sharded" else ""
    ranks, per_node = text.ring * text.tp, question.device.devices_per_node
    start = f"ringspan generate {model} --prompt-file prompt.txt --nproc {ranks}"
    if ranks > per_node:
        nodes = -(-ranks // per_node)
        while ranks % nodes:
            nodes += 1
        start = (
            f"torchrun --nnodes {nodes} --nproc-per-node {ranks // nodes} ... -m ringspan generate {model} "
            "--prompt-file prompt.txt"
        )
    return f"{start}{options}"


def _call(answer: TextPlan) -> str:
    """Return the Python call for several prompts, which the command line does not take."""
    text = answer.text
    axes = {"ring": text.ring, "replicate": text.replicate, "tp": text.tp}
    mesh = ", ".join(f"{axis}={size}" for axis, size in axes.items() if axis == "ring" or size > 1)
    ids = f"ids  # {text.batch:,} of the prompts on each replica" if text.replicate > 1 else "ids"
    return "\n".join(
        (
            f"mesh = rs.init_mesh({mesh})",
            "model = rs.parallelize(model.eval(), mesh)",
            f"text = model.generate({ids.partition('  #')[0]}, max_new_tokens={answer.question.new_tokens}, "
            f'weights="{text.weights}"){ids[3:]}',
        )
    )
