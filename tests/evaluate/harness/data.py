"""Tasks of lm-eval's three kinds of request, over lines of JSON that are written into a folder."""

import json
from pathlib import Path

TASKS = "local_choice", "local_rolling", "local_until", "local_sampled"
_CHOICES = [
    ("The sky is", ["blue", "green and loud", "seven"], 0),
    ("The sky is", ["a large blue thing", "no"], 1),
    (
        "The grass that grows on the hill behind the old mill is",
        ["green", "blue", "a letter"],
        0,
    ),
    ("", ["nothing stands before this", "or this"], 1),
]
_TEXTS = [
    "Call me Ishmael. " * 30,
    "Short.",
    "x",
    "It was the best of times, it was the worst of times.\n" * 4,
]
_YAML = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {kind}
{rest}
"""
_REST = {
    "local_choice": "doc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{gold}}'\n"
    "metric_list:\n  - metric: acc\n  - metric: acc_norm",
    "local_rolling": "doc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list:\n  - metric: word_perplexity\n  - metric: bits_per_byte",
    "local_until": "doc_to_text: '{{text}}'\ndoc_to_target: 'x'\ngeneration_kwargs:\n  until: ['e', 'zq']\n"
    "  do_sample: false\n  max_gen_toks: 24\nmetric_list:\n  - metric: exact_match",
    "local_sampled": "doc_to_text: '{{text}}'\ndoc_to_target: 'x'\ngeneration_kwargs:\n  until: ['zq']\n"
    "  do_sample: true\n  temperature: 0.7\n  max_gen_toks: 5\nmetric_list:\n  - metric: exact_match",
    "local_shots": "description: 'Be brief.'\ndoc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\n"
    "doc_to_target: '{{gold}}'\nfewshot_split: train\nnum_fewshot: 2\nmetric_list:\n  - metric: brier_score",
    "local_unsafe": "doc_to_text: '{{text}}'\ndoc_to_target: 'x'\nunsafe_code: true\ngeneration_kwargs:\n"
    "  until: ['e']\nmetric_list:\n  - metric: exact_match",
}
_KINDS = {
    "local_choice": "multiple_choice", "local_rolling": "loglikelihood_rolling", "local_until": "generate_until",
    "local_sampled": "generate_until", "local_shots": "multiple_choice", "local_unsafe": "generate_until",
}  # fmt: skip


def write(folder: Path) -> Path:
    texts = [{"text": text} for text in _TEXTS]
    choices = [
        {"text": text, "choices": choices, "gold": gold}
        for text, choices, gold in _CHOICES
    ]
    # there is to be room for the answer
    short = [{"text": text[:200]} for text in _TEXTS]
    rows = {
        "local_choice": choices,
        "local_rolling": texts,
        "local_until": short,
        "local_sampled": short,
        "local_shots": [
            {**row, "choices": row["choices"][:2], "gold": 0} for row in choices
        ],
        "local_unsafe": short,
    }
    for name in _KINDS:
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        definition = _YAML.format(
            name=name, data=data, kind=_KINDS[name], rest=_REST[name]
        )
        (folder / f"{name}.yaml").write_text(definition)
    return folder
