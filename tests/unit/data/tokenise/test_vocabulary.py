import pytest

from disaggkd_cli.data import compare_vocabularies, load_tokenizer, tokenizer_fingerprint
from disaggkd_cli.errors import UserError

from ..support import build_byte_tokenizer, build_word_tokenizer


def test_a_saved_tokenizer_loads_and_has_the_same_fingerprint(tmp_path, byte_tokenizer):
    byte_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("né").input_ids == byte_tokenizer("né").input_ids
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(byte_tokenizer)


def test_the_fingerprint_sees_merges_and_processing_but_not_padding_or_the_template(byte_tokenizer):
    plain = tokenizer_fingerprint(byte_tokenizer)
    assert plain == tokenizer_fingerprint(build_byte_tokenizer(template=None))
    assert plain != tokenizer_fingerprint(build_byte_tokenizer(bos=True))
    one, other = [("Ġ", "a"), ("Ġa", "b")], [("Ġ", "a"), ("a", "b")]
    assert tokenizer_fingerprint(build_byte_tokenizer(one)) != tokenizer_fingerprint(build_byte_tokenizer(other))
    padded = build_byte_tokenizer()
    padded(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(padded) == plain


@pytest.mark.parametrize(
    "name", ["{tmp}/nowhere", "./nowhere", "{tmp}/empty", "{tmp}/file.json", "{tmp}/no.gguf", "{tmp}/bad"]
)
def test_what_holds_no_tokenizer_is_refused_by_name(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "tokenizer.json").write_text("{")
    (tmp_path / "file.json").write_text("{}")
    name = name.format(tmp=tmp_path)
    with pytest.raises(UserError, match=f"tokenizer: .*{name.rsplit('/', 1)[1]}"):
        load_tokenizer(name)


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path, byte_tokenizer):
    byte_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Own: pass\n")
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}')
    try:
        load_tokenizer(tmp_path)
    except UserError:
        pass  # refusing it and reading its tokenizer.json alone are both right
    assert not (tmp_path / "was_run").exists()


def test_the_same_vocabulary_is_shared_whole_and_extra_ids_are_not_counted(byte_tokenizer):
    assert compare_vocabularies(byte_tokenizer, build_byte_tokenizer()) == len(byte_tokenizer)
    larger = build_byte_tokenizer()
    larger.add_tokens(["<extra>", "<more>"])
    assert compare_vocabularies(larger, byte_tokenizer) == len(byte_tokenizer)
    assert compare_vocabularies(byte_tokenizer, larger) == len(byte_tokenizer)


def test_two_permuted_ids_are_named_with_their_tokens():
    with pytest.raises(UserError) as error:
        compare_vocabularies(build_word_tokenizer("a b c d"), build_word_tokenizer("a c b d"))
    assert "2 of 6 shared ids differ" in str(error.value)
    assert "id 3 is '▁b' to the teacher and '▁c' to the student" in str(error.value)
    assert "id 4 is '▁c' to the teacher and '▁b' to the student" in str(error.value)


def test_only_the_first_few_of_many_differences_are_listed():
    with pytest.raises(UserError, match=r"8 of 10 shared ids differ.*; and 3 more"):
        compare_vocabularies(build_word_tokenizer("a b c d e f g h"), build_word_tokenizer("b c d e f g h a"))
