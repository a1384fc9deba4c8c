"""What a run leaves behind: its folder, its history, its checkpoints.

`load` reads a run folder into data frames. In reading order:

    folder.py               a run folder: create, open, append rows, resume
    run_config.py           config.toml: settings as text, and how two configurations differ
    identity.py             run.json: which run a folder holds, and which changes of its settings were accepted
    lock.py                 lock.json: one writer per folder
    history.py, ledger.py   rows as JSON lines, and the chain of digests that protects them
    checkpoints.py          save and load; checkpoint_folders.py names and orders them, manifest.py describes them
    multi_writer.py         a checkpoint that several processes write
    model_check.py          whether a checkpoint fits a model
    pytree.py               nested state as named tensors and plain values
    safetensors_io.py, tensor_bytes.py, checked_json.py, disk.py    files, bytes, digests, atomic writes
    phase_clock.py          the seconds of a round by phase
    frames.py               a run folder as data frames of pandas
"""

from tailopt.records.frames import RunFrames, load

__all__ = ["RunFrames", "load"]
