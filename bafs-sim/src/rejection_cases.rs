//! For tests of readers of text: slips of writers, and what they are told.

use std::fmt::{Debug, Display};

/// Refuses each line of `slips`, `RIGHT => WRONG => MESSAGE => …`: where the first RIGHT of `text`
/// is written as WRONG, `read` must fail with an error that contains every MESSAGE. `\n` is an end
/// of line.
pub(crate) fn assert_each_is_rejected<T: Debug, E: Display>(
    text: &str,
    slips: &str,
    read: impl Fn(&str) -> Result<T, E>,
) {
    for slip in slips.trim().lines() {
        let cells = slip.split("=>");
        let cells: Vec<String> = cells.map(|cell| cell.trim().replace("\\n", "\n")).collect();
        let [right, wrong, messages @ ..] = &cells[..] else {
            panic!("{slip}: two cells or more");
        };
        assert!(!messages.is_empty() && text.contains(right), "{slip}");
        let refused = match read(&text.replacen(right, wrong, 1)) {
            Err(error) => error.to_string(),
            Ok(read) => panic!("{slip}: read as {read:?}"),
        };
        for message in messages {
            assert!(refused.contains(message.as_str()), "{slip}: {refused}");
        }
    }
}
