"""One container of eight GPUs on Modal: modal run --detach examples/cluster/modal_train.py

A container that is taken back gets SIGINT and 30 s to save a step; Modal then calls the function again, which resumes
from the newest checkpoint. Several containers would need a folder that all see at once, which a Volume is not.
"""

import signal
import subprocess

import modal

source = modal.Image.debian_slim(python_version="3.12")
source = source.add_local_dir(".", "/src", copy=True, ignore=[".git", ".venv", "runs"])
image = source.run_commands("pip install '/src[hf]'")
runs = modal.Volume.from_name("ringspan-runs", create_if_missing=True)
app = modal.App("ringspan", image=image)
TRAIN = "ringspan train /src/examples/finetune.toml --nproc 8 --max-restarts 3 run=/runs/finetune"


@app.function(gpu="H100:8", volumes={"/runs": runs}, timeout=24 * 3600, retries=3)
def train() -> None:
    process = subprocess.Popen(TRAIN.split())
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    if code not in (0, 75):  # 75: stopped by a signal, and saved
        raise RuntimeError(f"ringspan train ended with exit code {code}")
