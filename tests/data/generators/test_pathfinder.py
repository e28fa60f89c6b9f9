import pytest

from jaxformers.data.generators import pathfinder


@pytest.mark.parametrize(
  ("resolution", "difficulty", "expected"),
  [
    (32, "hard", (5, 4)),
    (32, "easy", (10, 2)),
    (32, "2", (20, 1)),
    (256, "intermediate", (10, 3)),
  ],
)
def test_distractor_counts_by_resolution_and_difficulty(
  resolution, difficulty, expected
):
  assert pathfinder.distractor_counts(resolution, difficulty) == expected


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"resolution": 48}, "resolution=48.*32, 64, 128, 256"),
    ({"difficulty": "harder"}, "difficulty.*'harder'.*hard.*2, 3"),
    # Levels have one name, and numbers one form.
    ({"difficulty": "14"}, "difficulty.*'14'.*hard"),
    ({"difficulty": "04"}, "difficulty.*'04'.*hard"),
    ({"difficulty": 4}, "difficulty.*4.*hard"),
    ({"difficulty": "1"}, "difficulty.*'1'.*hard"),
    ({"num_images": 3}, "num_images=3"),
  ],
)
def test_settings_refuse_wrong_arguments(fields, message):
  with pytest.raises(ValueError, match=message):
    pathfinder.Settings(**fields)
