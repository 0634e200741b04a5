import pytest

from lit_data.commands.reports.untrusted import MASK, Masker


@pytest.mark.parametrize(
    "key", ["password", "api_key", "apiKey", "AWS_SECRET_ACCESS_KEY", "hf-token", "credentials"]
)
def test_value_of_a_secret_key_is_masked_there_and_wherever_it_comes_again(key: str) -> None:
    masker = Masker()
    assert masker.mask_tree({"store": {key: "hunter22", "user": "me"}}) == {
        "store": {key: MASK, "user": "me"}
    }
    assert masker.mask_text("cannot log in with hunter22!") == f"cannot log in with {MASK}!"


def test_everything_below_a_secret_key_is_masked() -> None:
    masker = Masker()
    assert masker.mask_tree(
        {"credentials": {"a": ["first-one"], "b": 3}, "n": [{"token": "x"}]}
    ) == {
        "credentials": MASK,
        "n": [{"token": MASK}],
    }
    assert masker.mask_text("first-one") == MASK


def test_what_is_no_secret_stays() -> None:
    tree = {
        "max_tokens": 512,
        "token": None,
        "key": "",
        "monitor": "val/dice",
        "keys": ["a"],
        "use_auth": False,
    }
    assert Masker().mask_tree(tree) == tree
    text = "unknown key 'sed'. The key is wrong; keyboard=us, monkey=1, sort=key"
    assert Masker().mask_text(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://me:pass@host/bucket", f"s3://{MASK}@host/bucket"),
        (
            "https://host/x?X-Amz-Signature=abc123&size=3",
            f"https://host/x?X-Amz-Signature={MASK}&size=3",
        ),
        ("+store={key:abc,secret:'d e',size:3}", f"+store={{key:{MASK},secret:{MASK},size:3}}"),
        ("data.storage.secret=abc", f"data.storage.secret={MASK}"),
        ('{"password": "a b"}', f'{{"password": {MASK}}}'),
        ("Authorization: Bearer abcdefgh123", "Authorization: "),
        ("AKIAABCDEFGHIJKLMNOP", MASK),
        ("hf_abcdefghijklmnopqrstuvwx", MASK),
    ],
)
def test_secrets_in_texts_are_masked(text: str, shown: str) -> None:
    masked = Masker().mask_text(text)
    assert masked.startswith(shown)
    assert "abc" not in masked
