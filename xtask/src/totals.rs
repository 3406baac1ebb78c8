//! Counts passed, failed and skipped tests from the closing lines of a test runner.

use std::fmt;
use std::ops::AddAssign;

use crate::shell::LineFilter;

/// How many tests ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestTotals {
    /// Ran and were right.
    pub(crate) passed: u64,
    /// Ran and were wrong, ran out of time, or could not start.
    pub(crate) failed: u64,
    /// Did not run.
    pub(crate) skipped: u64,
}

impl TestTotals {
    /// The sum over all closing lines.
    pub(crate) fn from_lines(lines: &[String]) -> Self {
        let mut sum = Self::default();
        for line in lines {
            sum += Self::from_line(line);
        }
        sum
    }

    /// Reads nextest's `Summary [ 1.0s] 3 tests run: 2 passed (1 slow), 1 failed, 0 skipped` and
    /// libtest's `test result: ok. 1 passed; 0 failed; 2 ignored; …`; other lines count nothing.
    fn from_line(line: &str) -> Self {
        let counts = if line.trim_start().starts_with("Summary [") {
            line.split_once("run:").map_or("", |(_, counts)| counts)
        } else if let Some(result) = line.strip_prefix("test result:") {
            result.split_once('.').map_or("", |(_, counts)| counts)
        } else {
            ""
        };
        let mut totals = Self::default();
        for count in strip_parentheses(counts).split([',', ';']) {
            let mut words = count.split_whitespace();
            let (Some(Ok(number)), Some(word)) =
                (words.next().map(str::parse::<u64>), words.next())
            else {
                continue;
            };
            match word {
                "passed" => totals.passed += number,
                "skipped" | "ignored" => totals.skipped += number,
                "measured" | "filtered" => {}
                // "failed", "timed out", "exec failed": whatever a runner calls it, it is not well.
                _ => totals.failed += number,
            }
        }
        totals
    }

    /// Counts tests that passed only because they announced that they do not run here.
    pub(crate) fn move_to_skipped(&mut self, count: u64) {
        let moved = count.min(self.passed);
        self.passed -= moved;
        self.skipped += moved;
    }
}

impl AddAssign for TestTotals {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for TestTotals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

/// A filter for one stream: the closing lines of nextest (from its summary to the end) and of
/// libtest (one line per program).
pub(crate) fn closing_line_filter() -> LineFilter {
    let mut after_summary = false;
    Box::new(move |line| {
        after_summary |= line.trim_start().starts_with("Summary [");
        // Without the margin: nextest indents what a failed test printed, and that may look alike.
        after_summary && !line.is_empty() || line.starts_with("test result:")
    })
}

fn strip_parentheses(text: &str) -> String {
    let mut depth = 0_u32;
    let mut plain = String::new();
    for character in text.chars() {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ if depth == 0 => plain.push(character),
            _ => {}
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, passed: u64, failed: u64, skipped: u64) {
        assert_eq!(
            TestTotals::from_line(line),
            TestTotals {
                passed,
                failed,
                skipped
            },
            "{line}"
        );
    }

    #[test]
    fn closing_lines_of_both_runners_are_read() {
        check(
            "     Summary [   0.004s] 5 tests run: 5 passed, 1 skipped",
            5,
            0,
            1,
        );
        check(
            "Summary [ 9.1s] 4/6 tests run: 2 passed (1 slow, 1 leaky), 1 failed (1 due to being \
             leaky), 1 timed out, 3 skipped",
            2,
            2,
            3,
        );
        check(
            "test result: ok. 1 passed; 0 failed; 2 ignored; 0 measured; 7 filtered out; \
             finished in 0.00s",
            1,
            0,
            2,
        );
        check(
            "test result: FAILED. 1 passed; 4 failed; 0 ignored; 0 measured",
            1,
            4,
            0,
        );
        check("running 3 tests", 0, 0, 0);
    }

    #[test]
    fn sums_are_printed_in_one_plain_line() {
        let lines = [
            "Summary [ 1s] 2 tests run: 2 passed, 1 skipped",
            "test result: ok. 3 passed; 1 failed",
        ];
        let totals = TestTotals::from_lines(&lines.map(str::to_owned));
        assert_eq!(totals.to_string(), "5 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn announced_skips_are_not_passes() {
        let mut totals = TestTotals {
            passed: 5,
            failed: 0,
            skipped: 1,
        };
        totals.move_to_skipped(2);
        assert_eq!(
            totals,
            TestTotals {
                passed: 3,
                failed: 0,
                skipped: 3
            }
        );
    }

    #[test]
    fn everything_after_the_summary_is_kept() {
        let mut keep = closing_line_filter();
        let kept = [
            "PASS a",
            "  Summary [ 1s] 1 tests run: 1 passed, 0 skipped",
            "",
            "FAIL b",
        ];
        assert_eq!(kept.map(&mut keep), [false, true, false, true]);
    }
}
