"""Reading a config: everything wrong is said at once, with the key and the mend."""

import textwrap
import typing

import pytest

from disaggkd_cli.config import Config, check, load, to_yaml
from disaggkd_cli.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def problems(path, *overrides, running=False) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(path, overrides, running=running)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_defaults_and_values(write):
    config = load(write("train: {steps: 7}\nloss: {beta: 0.25}"))
    assert (config.train.steps, config.loss.beta, config.transport.ring_depth) == (7, 0.25, 3)
    assert config.global_batch_sequences == 4


def test_overrides_win_from_left_to_right(write):
    config = load(write("train: {steps: 7}"), ["train.steps=8", "train.steps=9", "student.freeze=['*embed*']"])
    assert config.train.steps == 9
    assert config.student.freeze == ["*embed*"]


def test_an_override_reaches_an_optional_section(write):
    assert load(write(""), ["student.from_teacher.layers=[0, 2]"]).student.from_teacher.layers == [0, 2]


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "1E-4"])
def test_numbers_as_people_write_them(write, text):
    assert load(write(f"train: {{learning_rate: {text}}}")).train.learning_rate == pytest.approx(1e-4)


def test_every_problem_is_reported_at_once(write):
    found = problems(
        write(
            """
            teacher: {dtyp: bfloat16}
            train: {steps: ten, stepz: 3}
            transport: {ring_depth: 0}
            loss: {divergence: forward_lk, beta: 2}
            """
        ),
        "train.accumulation=0",
    )
    text = "\n".join(found)
    assert "teacher.dtyp: there is no such key; did you mean teacher.dtype?" in text
    assert "train.stepz: there is no such key; did you mean train.steps?" in text
    assert "train.steps: is the text ten" in text
    assert "transport.ring_depth: 0 is too small; it must be at least 1" in text
    assert "loss.divergence: 'forward_lk' is not known; did you mean forward_kl?" in text
    assert "loss.beta: 2.0 is outside 0 … 1" in text
    assert "train.accumulation: 0 is too small" in text
    assert len(found) == 7


def test_a_key_of_another_section_is_recognised(write):
    (problem,) = problems(write("train: {temperature: 2}"))
    assert "did you mean loss.temperature?" in problem


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["loss.kd_weight=0"], "loss.kd_weight: both it and loss.ce_weight are 0"),
        (["loss.hidden_loss=mse"], "loss.hidden_loss: mse is chosen, but loss.hidden_weight is 0"),
        (["loss.hidden_weight=-1"], "loss.hidden_weight: -1.0 must be a number, at least 0"),
        (["loss.hidden_weight=.inf"], "loss.hidden_weight: inf must be a number, at least 0"),
        (["loss.hidden_weight=1", "loss.hidden_loss=cosin"], "did you mean cosine"),
        (["student.model=a/b", "student.from_config=a/b"], "give only one of student.model, student.from_config"),
        (["student.ranks=3", "student.replicate=2"], "student.replicate: 2 does not divide student.ranks=3"),
        (["loss.vocabulary_parallel=maybe"], "loss.vocabulary_parallel: 'maybe' is not known; there are true, false"),
        (["loss.vocabulary_parallel=true", "loss.implementation=full"], "full forms whole rows of logits"),
        (["student.attention=flash"], "student.attention: 'flash' is not known"),
        (
            ["student.attention=flash_attention_2", "student.dtype=float32"],
            "computes in 16 bits; set student.dtype=bfloat16",
        ),
        (["data.eval=1.5"], "data.eval: 1.5 must be a fraction between 0 and 1"),
        (["data.eval=true"], "data.eval: True must be a path"),
        (["launch.threads=none"], "launch.threads: 'none' must be auto or a number of threads"),
        (["launch.rendezvous=here"], "launch.rendezvous: 'here' must be host:port"),
        (["launch.rendezvous=node1:29400"], "set launch.bind=all"),
        (["loss.memory_budget=lots"], "loss.memory_budget: 'lots' is not a size"),
        (["loss.memory_budget=12KiB"], "loss.memory_budget: 12KiB is below 1MiB"),
        (["loss.divergence=jsd", "loss.beta=1"], "loss.beta=1.0 makes jsd zero everywhere; for a pure KL choose"),
        (["loss.divergence=skewed_reverse_kl", "loss.beta=1"], "it must be below 1"),
        (["student.from_teacher.layers=every_0"], "must be every_N"),
        (["student.from_teacher.layers=[2, 1]"], "must be rising layer numbers"),
        (["train.adam_betas=[0.9]"], "train.adam_betas"),
        (["data.sequence_length=1"], "data.sequence_length: 1 leaves no next token"),
        (["transport.timeout=-1"], "transport.timeout: -1.0 must be above 0"),
        (["train.learning_rate=.nan"], "train.learning_rate: nan"),
        (["train=5"], "train: is a section, not a value"),
        (["train.steps"], "an override is written key=value"),
        (["run_dir=${oc.env:HOME}"], "calls a resolver"),
        (["student.freeze=['${oc.env:HOME}']"], "calls a resolver"),
    ],
)
def test_keys_that_contradict_or_make_no_sense(write, overrides, expected):
    text = "\n".join(problems(write("teacher: {model: a/b}"), *overrides))
    assert expected in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {steps: 1, steps: 2}", "key 'steps' stands twice"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("a: " + "[" * 40 + "]" * 40, "nested deeper"),
        ("- 1\n- 2", "a config is a mapping"),
        ("train: {steps: 1", "line 1"),
        ("train: !!python/object/apply:os.system ['true']", "not valid YAML here"),
        ("1: 2", "key 1 is not text"),
    ],
)
def test_files_that_are_no_plain_config(write, text, expected):
    with pytest.raises(UserError, match=expected.replace("(", r"\(")):
        load(write(text))


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(UserError, match="did you mean .*quickstart.yaml"):
        load(tmp_path / "quikstart.yaml")
    with pytest.raises(UserError, match="is a directory"):
        load(tmp_path)
    (tmp_path / "big.yaml").write_text("#" * (2 << 20))
    with pytest.raises(UserError, match="larger than 1 MiB"):
        load(tmp_path / "big.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load(tmp_path / "binary.yaml")


def test_the_printed_config_reads_back_to_itself(write, tmp_path):
    config = load(write("student: {from_teacher: {layers: [0, 2]}}\ntrain: {learning_rate: 3e-5}"))
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load(again) == config


def test_what_a_run_needs_and_a_plan_does_not(write, tmp_path):
    path = write("teacher: {model: ./nowhere}\ndata: {train: nowhere.txt}")
    assert load(path).teacher.model == "./nowhere"
    text = "\n".join(problems(path, "transport.backend=nccl", "launch.device=cpu", running=True))
    assert "transport.backend: nccl goes between GPUs, and launch.device is cpu" in text
    assert "teacher.model: ./nowhere does not exist" in text
    assert "data.train: nowhere.txt does not exist" in text
    assert "student.model: say where the student starts" in text


def test_a_near_file_is_suggested(write, tmp_path):
    (tmp_path / "novels.txt").write_text("text")
    (problem,) = problems(
        write("teacher: {model: a/b}\nstudent: {model: a/b}"), f"data.train={tmp_path}/novel.txt", running=True
    )
    assert problem.endswith(f"did you mean {tmp_path}/novels.txt?")


def test_the_default_config_is_sound():
    assert check(Config()) == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps=abc", "train.steps: is the text abc, but must be a whole number"),
        ("train.steps=1.5", "train.steps: is 1.5, but must be a whole number"),
        ("train.learning_rate=null", "train.learning_rate: is null, but must be a number"),
        ("log.tensorboard=maybe", "log.tensorboard: is the text maybe, but must be true or false"),
        ("student.freeze=5", "student.freeze: is 5, but must be a list of texts"),
        ("run_dir=[a]", "run_dir: is the list [a], but must be text"),
        ("data.eval_sequences=[]", "data.eval_sequences: is the list [], but must be a whole number or null"),
    ],
)
def test_a_wrong_type_is_said_in_words(tmp_path, override, said):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\n")
    with pytest.raises(UserError) as refused:
        load(path, [override])
    assert f"  {said}" in str(refused.value).splitlines()


def test_every_type_of_the_schema_has_words():
    from disaggkd_cli.config.load import annotation_of, dataclass_of, known_keys, words_of_type

    for key in known_keys():
        annotation = annotation_of(key)
        if annotation is not typing.Any and dataclass_of(annotation) is None:
            assert words_of_type(annotation), (key, annotation)
