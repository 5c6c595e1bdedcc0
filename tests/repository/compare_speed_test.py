"""The interval that scripts/compare_speed.py prints."""
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
import compare_speed  # noqa: E402


class Interval(unittest.TestCase):
    def test_leaves_away_what_coins_would_on_each_side(self):
        # At most 5 of 20 tosses are heads with a probability of 2.07 %, at most 6 with 5.8 %; at most 1 of 8 with 3.5 %.
        for count, low in {1: 1, 5: 1, 8: 1, 9: 2, 20: 6}.items():
            self.assertEqual(compare_speed.interval(range(count, 0, -1)), (low, count + 1 - low), count)


if __name__ == "__main__":
    unittest.main()
