"""Launchers of clusters call the right programs, with the right arguments."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SOFTMAX = "jaxformers/models/mixers/softmax.py"
# A file of each part that is installed, beside the launchers.
PACKED = (
  "setup.cfg",
  "pyproject.toml",
  "README.md",
  "LICENSE",
  "configs/lra/text.py",
  SOFTMAX,
)
# Without site packages it starts several times as fast.
RECORDER = (
  f"#!{sys.executable} -SE"
  + """
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
  json.dump(sys.argv, file)
  file.write("\\n")
if sys.argv[1:3] == ["create", "-f"]:
  open(os.environ["RECORD"] + ".yaml", "w").write(sys.stdin.read())
# A test may set the answer of a program, or of a verb of gcloud.
verb = os.path.basename(sys.argv[0])
verb = ("".join(sys.argv[4:5]) if verb == "gcloud" else verb).upper()
if verb == "SRUN" and "RUNS" in os.environ:
  os.spawnvp(os.P_WAIT, sys.argv[2], sys.argv[2:])
print(os.environ.get("SAYS_" + verb, os.environ.get("SAYS", "")))
sys.stderr.write(os.environ.get("ERRS", ""))
sys.exit(int(os.environ.get("STATUS_" + verb, os.environ.get("STATUS", "0"))))
"""
)


@pytest.fixture
def run(tmp_path):
  """A function that runs a script: what it called, and how it ended."""
  for name in ("gcloud", "kubectl", "srun", "scontrol", "python"):
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(RECORDER)
    path.chmod(0o755)
  record = tmp_path / "record"

  def call(script, *arguments, **variables):
    record.unlink(missing_ok=True)
    variables["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    variables["RECORD"] = str(record)
    ran = subprocess.run(
      [str(LAUNCH / script), *arguments],
      env=os.environ | variables,
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
    )
    lines = record.read_text().splitlines() if record.exists() else []
    calls = [[Path(c[0]).name, *c[1:]] for c in map(json.loads, lines)]
    return ran, calls

  call.record = record
  return call


POD = ("--name", "pod", "--zone", "z")
SLURM_RUN = ["python", "-m", "jaxformers.main", "--distributed"]


@pytest.fixture
def unpacked(tmp_path):
  """A folder like an unpacked archive: every part, but no git checkout."""
  folder = tmp_path / "outer" / "unpacked"
  for name in PACKED:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).touch()
  shutil.copytree(LAUNCH, folder / "launch")
  return folder


@pytest.fixture
def pod(unpacked):
  """Path of the launcher of pods in a folder of its own."""
  return str(unpacked / "launch" / "tpu_pod.sh")


def test_tpu_pod_script_creates_runs_and_deletes_a_pod(run, pod):
  head = ["gcloud", "compute", "tpus", "tpu-vm"]
  _, (created,) = run(pod, "create", *POD, "--type", "v4-32", "--spot")
  assert created[:6] == [*head, "create", "pod"]
  assert created[created.index("--accelerator-type") + 1] == "v4-32"
  assert "--spot" in created
  assert created[-2:] == ["--zone", "z"]
  _, (copied, installed) = run(pod, "install", *POD)
  assert copied[4] == "scp"
  assert "--worker=all" in copied
  assert "pip install --quiet -e '.[tpu]'" in installed[7]
  _, (told,) = run(pod, "prepare", *POD, "--", "listops")
  assert "-m jaxformers prepare listops" in told[7]
  arguments = ("--config", "a.py:b=c", "--workdir", "/a b")
  _, (started,) = run(pod, "run", *POD, "--", *arguments)
  assert started[5:7] == ["pod", "--worker=all"]
  command = "jaxformers.main --distributed --config a.py:b=c --workdir /a\\ b"
  assert command in started[7]
  _, (told,) = run(pod, "stop", *POD)
  assert told[6] == "--worker=0"
  _, (gone,) = run(pod, "delete", *POD, "--project", "p")
  assert gone[4:] == [
    "delete",
    "pod",
    "--quiet",
    "--zone",
    "z",
    "--project",
    "p",
  ]


@pytest.mark.parametrize(
  ("options", "version"),
  [
    (("--type", "v4-32"), "tpu-ubuntu2204-base"),
    (("--type", "v5litepod-16"), "v2-alpha-tpuv5-lite"),
    (("--type", "v5p-8"), "v2-alpha-tpuv5"),
    (("--type", "v6e-64"), "v2-alpha-tpuv6e"),
    (("--type", "v6e-64", "--version", "other"), "other"),
  ],
)
def test_tpu_pod_script_takes_the_software_of_the_type(
  run, pod, options, version
):
  _, (created,) = run(pod, "create", *POD, *options)
  assert created[created.index("--version") + 1] == version


def test_tpu_pod_script_compiles_for_the_type_in_a_dry_run(run, pod):
  fields = (
    "--config.seed=1",
    "--config.mesh",
    "data:16",
    "--noconfig.packing",
    "--config.packing",
  )
  arguments = ("--config", "lra/text", *fields, "--workdir", "w")
  options = (*POD, "--dry_run", "--type", "v5litepod-16")
  ran, (compiled,) = run(pod, "run", *options, "--", *arguments)
  assert compiled[1:] == [
    "-m",
    "jaxformers",
    "compile",
    "lra/text",
    "--device",
    "v5litepod-16",
    *fields,
  ]
  assert "python -m jaxformers compile lra/text" in ran.stdout
  assert "gcloud" in ran.stdout  # The command is printed, and not run.
  # Without a type, or without --dry_run, nothing is compiled.
  assert not run(pod, "run", *POD, "--dry_run", "--", *arguments)[1]
  _, calls = run(pod, "run", *POD, "--type", "v4-8", "--", *arguments)
  assert [call[0] for call in calls] == ["gcloud"]


def git(*arguments):
  if not shutil.which("git"):
    pytest.skip("no git")
  name = ("-c", "user.name=n", "-c", "user.email=e")
  subprocess.run(["git", *name, *arguments], check=True)


def installed_files(run, script, tmp_path):
  """Runs the launcher: what it said, and the names of the files it copies."""
  ran, (copied, _) = run(script, "install", *POD, TMPDIR=str(tmp_path))
  assert ran.returncode == 0, ran.stderr
  with tarfile.open(copied[5]) as archive:
    return ran.stderr, archive.getnames()


@pytest.mark.parametrize("is_inside_a_repository", [False, True])
def test_tpu_pod_script_installs_an_unpacked_archive(
  run, pod, unpacked, tmp_path, is_inside_a_repository
):
  cache = unpacked / "jaxformers" / "data" / "__pycache__"
  cache.mkdir(parents=True)
  (cache / "stale.pyc").touch()
  (unpacked / "runs").mkdir()
  if is_inside_a_repository:
    git("init", "-q", unpacked.parent)
  said, names = installed_files(run, pod, tmp_path)
  assert f"{unpacked} is not a git checkout" in said
  parts = {name.split("/")[0] for name in PACKED} | {"launch"}
  assert {name.split("/")[0] for name in names} == parts
  assert SOFTMAX in names
  assert not [name for name in names if "__pycache__" in name]


def test_tpu_pod_script_installs_committed_files_of_a_checkout(
  run, pod, unpacked, tmp_path
):
  git("init", "-q", unpacked)
  git("-C", unpacked, "add", ".")
  git("-C", unpacked, "commit", "-q", "-m", "Add all")
  (unpacked / "jaxformers" / "draft.py").touch()
  said, names = installed_files(run, pod, tmp_path)
  assert said == ""
  assert SOFTMAX in names
  assert "jaxformers/draft.py" not in names


RESUME = ("resume", *POD, "--type", "v4-8", "--", "--config", "a")
ANEW = ["create", "scp", "ssh", "ssh"]  # Makes a pod, and starts the run.


@pytest.mark.parametrize(
  ("said", "verbs"),
  [
    ({"SAYS": "READY", "SAYS_SSH": "live"}, ["describe", "ssh"]),
    ({"SAYS": "READY", "SAYS_SSH": "dead"}, ["describe", "ssh", "ssh", "ssh"]),
    ({"SAYS": "PREEMPTED"}, ["describe", "delete", *ANEW]),
    (
      {"STATUS_DESCRIBE": "1", "ERRS": "NOT_FOUND: pod was not found"},
      ["describe", *ANEW],
    ),
  ],
)
def test_tpu_pod_script_recreates_a_pod_by_its_state(run, pod, said, verbs):
  ran, calls = run(pod, *RESUME, **said)
  assert ran.returncode == 0, ran.stderr
  assert [call[4] for call in calls] == verbs


@pytest.mark.parametrize(
  ("said", "message", "verbs"),
  [
    # The network is down; the pod may exist.
    (
      {"STATUS_DESCRIBE": "1", "ERRS": "no network"},
      "no network",
      ["describe"],
    ),
    # The host does not say whether the run is live.
    (
      {"SAYS": "READY", "SAYS_SSH": "", "STATUS_SSH": "255"},
      "does not answer",
      ["describe", "ssh"],
    ),
    # The pod cannot be made.
    (
      {"SAYS": "PREEMPTED", "STATUS_CREATE": "1"},
      "",
      ["describe", "delete", "create"],
    ),
  ],
)
def test_tpu_pod_script_does_not_resume_what_it_cannot_see(
  run, pod, said, message, verbs
):
  ran, calls = run(pod, *RESUME, **said)
  assert ran.returncode == 1
  assert message in ran.stderr
  assert [call[4] for call in calls] == verbs


def test_tpu_pod_script_leaves_a_live_run_alone(run, pod, tmp_path):
  _, (started,) = run(pod, "run", *POD, "--", "--config", "a")
  command = started[7].removeprefix("--command=")
  folder = tmp_path / "host" / "jaxformers"
  folder.mkdir(parents=True)
  sleep = [sys.executable, "-SE", "-c", "import time; time.sleep(60)"]
  with subprocess.Popen([*sleep, "jaxformers.main"]) as live:
    (folder / "run.pid").write_text(str(live.pid))
    ran = subprocess.run(
      ["bash", "-c", command],
      cwd=folder.parent,
      capture_output=True,
      text=True,
      check=False,
    )
    live.kill()
  assert ran.returncode == 1
  assert "a run is live" in ran.stderr
  assert (folder / "run.pid").read_text() == str(live.pid)
  assert not (folder / "run.log").exists()


def test_tpu_pod_script_does_not_delete_a_pod_being_created(run):
  ran, calls = run(
    "tpu_pod.sh",
    "resume",
    *POD,
    "--type",
    "v4-8",
    "--",
    "--config",
    "a",
    SAYS="CREATING",
  )
  assert ran.returncode == 1
  assert "the pod is CREATING" in ran.stderr
  assert [call[4] for call in calls] == ["describe"]


@pytest.mark.parametrize(
  ("status", "restarts", "again"),
  [
    ("0", "0", False),
    ("143", "0", True),
    ("2", "0", False),
    ("75", "20", False),
  ],
)
def test_slurm_script_requeues_a_job_that_asks_for_it(
  run, status, restarts, again
):
  ran, calls = run(
    "slurm.sbatch",
    "--config",
    "a b",
    STATUS=status,
    SLURM_NNODES="4",
    SLURM_JOB_ID="7",
    SLURM_RESTART_COUNT=restarts,
  )
  assert ran.returncode == int(status)
  assert calls[0][:4] == ["srun", "--kill-on-bad-exit=1", "bash", "-c"]
  assert calls[0][6:] == [*SLURM_RUN, "--config", "a b"]
  assert calls[1:] == ([["scontrol", "requeue", "7"]] if again else [])
  is_last = restarts == "20"
  assert ("not requeued" in ran.stderr) == is_last


@pytest.mark.parametrize(
  ("first", "status", "again"),
  [
    # A mistake on one node: srun returns how the others died.
    ("2", 2, False),
    ("1", 1, False),
    ("75", 143, True),
    ("0", 143, True),
  ],
)
def test_slurm_script_takes_the_status_of_the_first_node_that_fails(
  run, first, status, again
):
  ran, (_, told, *rest) = run(
    "slurm.sbatch",
    "--config",
    "a b",
    STATUS_PYTHON=first,
    STATUS_SRUN="143",
    RUNS="",
    SLURM_NNODES="4",
    SLURM_JOB_ID="7",
  )
  assert ran.returncode == status
  assert told == [*SLURM_RUN, "--config", "a b"]
  assert rest == ([["scontrol", "requeue", "7"]] if again else [])


def test_k8s_script_fills_in_a_jobset(run):
  options = ("--name", "n", "--image", "i:1", "--hosts", "4", "--claim", "c")
  ran, calls = run("k8s.sh", "apply", *options, "--", "--config", 'a "b"')
  assert ran.returncode == 0, ran.stderr
  assert calls == [["kubectl", "create", "-f", "-"]]
  text = Path(f"{run.record}.yaml").read_text()
  assert "__" not in text
  assert 'args: ["--config", "a \\"b\\""]' in text
  assert "completions: 4" in text
  assert 'value: "n-run-0-0.n:8476"' in text
  dry, calls = run(
    "k8s.sh", "apply", *options, "--dry_run", "--", "--config", "a"
  )
  assert not calls
  assert dry.stdout.startswith("# A JobSet")
  for action, command in (("delete", "delete jobset n"), ("watch", "logs -f")):
    dry, calls = run("k8s.sh", action, "--name", "n", "--dry_run")
    assert not calls
    assert dry.stdout.startswith(f"kubectl {command}")


def test_k8s_script_quotes_names_that_yaml_reads_as_values(run):
  yaml = pytest.importorskip("yaml")
  options = {"name": "null", "image": "1.5", "claim": "1e3", "resource": "on"}
  flags = [part for k, v in options.items() for part in (f"--{k}", v)]
  arguments = ["--config", "a: {b} # c\nd", "\u00e9\U0001f600", "$(x) `y` 'z"]
  ran, _ = run("k8s.sh", "apply", *flags, "--dry_run", "--", *arguments)
  assert ran.returncode == 0, ran.stderr
  parsed = yaml.safe_load(ran.stdout)
  assert parsed["metadata"]["name"] == "null"
  (job,) = parsed["spec"]["replicatedJobs"]
  spec = job["template"]["spec"]
  # A mistake of the user ends all, and a pod that saves has no twin.
  assert spec["podReplacementPolicy"] == "Failed"
  (rule,) = spec["podFailurePolicy"]["rules"]
  assert rule["onExitCodes"]["values"] == [2]
  pod = spec["template"]["spec"]
  assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
  (container,) = pod["containers"]
  assert container["image"] == "1.5"
  assert container["args"] == arguments
  assert container["resources"]["limits"] == {"on": "8"}
  (volume,) = pod["volumes"]
  assert volume["persistentVolumeClaim"]["claimName"] == "1e3"


@pytest.mark.parametrize(
  ("option", "value"),
  [
    ("--name", "Big"),
    ("--name", "n-"),
    ("--name", 46 * "n"),
    ("--name", "4n"),
    ("--name", "n" * 51),
    ("--name", "n\n  labels: {a: b}"),
    ("--image", "i:1\n          hostNetwork: true"),
    ("--image", "i: {a"),
    ("--claim", "c, readOnly: true"),
    ("--claim", "-c"),
    ("--resource", 'x": 1, "y'),
    ("--hosts", "0"),
    ("--hosts", "many"),
    ("--devices", "a[$(touch injected)]"),
    ("--devices", '1"\nx: "'),
  ],
)
def test_k8s_script_refuses_values_kubernetes_refuses(run, option, value):
  options = {"--name": "n", "--image": "i", "--claim": "c", option: value}
  flags = [part for pair in options.items() for part in pair]
  ran, calls = run("k8s.sh", "apply", *flags, "--", "--config", "a")
  assert ran.returncode == 2
  assert f"launch/k8s.sh: {option} '{value}': " in ran.stderr
  assert not calls
  assert ran.stdout == ""


@pytest.mark.parametrize("option", ["--name", "--zone", "--project", "--type"])
@pytest.mark.parametrize("value", ["--quiet", "a b", "$(b)"])
def test_tpu_pod_script_refuses_names_that_are_options_or_commands(
  run, option, value
):
  ran, calls = run("tpu_pod.sh", "create", *POD, option, value)
  assert ran.returncode == 2
  assert f"launch/tpu_pod.sh: {option} '{value}': " in ran.stderr
  assert not calls


@pytest.mark.parametrize("name", ["RESTARTS", "SLURM_RESTART_COUNT"])
def test_slurm_script_does_not_evaluate_variables(run, tmp_path, name):
  value = f"a[$(touch {tmp_path}/injected)]"
  variables = {"SLURM_JOB_ID": "7", "STATUS": "143", name: value}
  ran, calls = run("slurm.sbatch", "--config", "a", **variables)
  assert ran.returncode == 2
  assert f"{name}='{value}'" in ran.stderr
  assert not calls
  assert not (tmp_path / "injected").exists()


@pytest.mark.parametrize(
  "arguments",
  [
    ("k8s.sh", "apply", "--name"),
    ("tpu_pod.sh", "create", "--name"),
    ("tpu_pod.sh",),
    ("tpu_pod.sh", "create", "--name", "a"),
    ("tpu_pod.sh", "run", *POD),
    ("tpu_pod.sh", "jump", *POD),
    ("k8s.sh", "apply", "--name", "n"),
    ("k8s.sh", "watch"),
  ],
)
def test_remote_scripts_print_usage_for_wrong_arguments(run, arguments):
  ran, calls = run(*arguments)
  assert ran.returncode == 2
  assert "usage: launch/" in ran.stderr
  assert not calls


def test_launch_scripts_pass_shellcheck():
  program = shutil.which("shellcheck")
  if not program:
    pytest.skip("no shellcheck")
  scripts = [*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"]
  subprocess.run([program, *map(str, scripts)], check=True)
