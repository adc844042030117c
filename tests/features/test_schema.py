"""The order of the features and the hash that guards it."""

from lorazor.features.schema import FEATURES, SCHEMA_HASH


def test_names_are_unique() -> None:
    """No feature appears twice."""
    assert len(set(FEATURES)) == len(FEATURES)


def test_hash_is_the_one_that_artifacts_carry() -> None:
    """Changing the schema must be meant: it makes every trained policy unusable, so the hash is written down here."""
    assert SCHEMA_HASH == "d92cba05a871ec5fc13f6dd048285c5475963ce756816fe1c76ca77b3f5bbdf6"
    assert len(FEATURES) == 35
