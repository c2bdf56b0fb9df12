"""Stand-ins for SLURM's programs that really start the ranks, on this machine. One file, called by the program's name.

sbatch    runs a copy of the script from a folder of its own, with a job's variables; prints `Submitted batch job N`
srun      starts --ntasks processes with a step's variables, passes signals on, returns the highest exit code
scontrol  `requeue ID` is written down
scancel   is written down

$SLURM_STUB is a folder for what they remember: `jobs/N` (what was submitted, its process and exit code) and `calls`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ.get("SLURM_STUB", "/nonexistent"))


def note(*words: str) -> None:
    with (STATE / "calls").open("a") as file:
        file.write(" ".join(words) + "\n")


def split_options(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Separate leading `--name=value` and `--name` from the rest."""
    options = {}
    while arguments and arguments[0].startswith("--"):
        name, _, value = arguments[0][2:].partition("=")
        options[name] = value
        arguments = arguments[1:]
    return options, arguments


def directives(script: Path) -> list[dict[str, str]]:
    """The #SBATCH options of a script, one dict for each component of the job."""
    components: list[dict[str, str]] = [{}]
    for line in script.read_text().splitlines():
        if line.startswith("#SBATCH hetjob"):
            components.append({})
        elif line.startswith("#SBATCH --"):
            components[-1].update(split_options(line.split()[1:])[0])
    return components


def sbatch(arguments: list[str]) -> int:
    options, (script, *rest) = split_options(arguments)
    if "reject" in options:
        print("sbatch: error: invalid partition specified", file=sys.stderr)
        return 1
    (STATE / "jobs").mkdir(exist_ok=True)
    number = 4000 + len(list((STATE / "jobs").iterdir()))
    job = STATE / "jobs" / str(number)
    job.mkdir()
    copied = job / "slurm_script"
    shutil.copy(script, copied)
    components = directives(copied)
    components[0] |= options
    (job / "options.json").write_text(json.dumps(components))
    tasks = os.environ.get("SLURM_STUB_TASKS", "1").split(":")
    variables = {
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NAME": components[0].get("job-name", "slurm_script"),
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NTASKS": tasks[0],
        "SLURM_TASKS_PER_NODE": tasks[0],
        "SLURM_RESTART_COUNT": options.get("restart-count", "0"),
        "SLURMD_NODENAME": "localhost",
    }
    if "array" in options:
        variables["SLURM_ARRAY_TASK_ID"] = "0"
    if len(components) > 1:
        variables["SLURM_HET_SIZE"] = str(len(components))
        for index, count in enumerate(tasks):
            variables[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"] = "localhost"
            variables[f"SLURM_TASKS_PER_NODE_HET_GROUP_{index}"] = count
    (job / "arguments.json").write_text(json.dumps(rest))
    with (job / "output").open("ab") as output:
        keeper = subprocess.Popen(
            [sys.executable, __file__, "slurmd", str(job)],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    (job / "session").write_text(str(keeper.pid))
    print(number if "parsable" in options else f"Submitted batch job {number}")
    return 0


def slurmd(job: Path) -> int:
    """Run a job's script to its end and write down its process and exit code."""
    script = subprocess.Popen(["bash", str(job / "slurm_script"), *json.loads((job / "arguments.json").read_text())])
    (job / "pid").write_text(str(script.pid))
    (job / "code").write_text(str(script.wait()))
    return 0


def srun(arguments: list[str]) -> int:
    options, command = split_options(arguments)
    count = os.environ["SLURM_NTASKS"]
    if "het-group" in options:
        count = os.environ[f"SLURM_TASKS_PER_NODE_HET_GROUP_{options['het-group']}"]
    count = int(options.get("ntasks", count))
    note("srun", *arguments)
    ranks = []
    for rank in range(count):
        step = {
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_NTASKS": str(count),
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_TASKS_PER_NODE": str(count),
            "SLURM_STEP_NODELIST": "localhost",
        }
        ranks.append(subprocess.Popen(command, env={**os.environ, **step}))

    def forward(number: int, frame: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    killed = False
    while any(rank.poll() is None for rank in ranks):
        if "kill-on-bad-exit" in options and not killed and any(rank.poll() for rank in ranks):
            killed = True
            time.sleep(2)
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
        time.sleep(0.05)
    return max(128 - rank.returncode if rank.returncode < 0 else rank.returncode for rank in ranks)


def main() -> int:
    program, arguments = Path(sys.argv[1]).name, sys.argv[2:]
    if program == "sbatch":
        return sbatch(arguments)
    if program == "slurmd":
        return slurmd(Path(arguments[0]))
    if program == "srun":
        return srun(arguments)
    note(program, *arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
