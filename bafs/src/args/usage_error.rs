//! Words of the command line that no machine and no cluster can do: the exit code says so, as for
//! those that the parser refuses.

use std::fmt;

use anyhow::Error;

/// Exit code of a command whose words are wrong, as of one that cannot be parsed.
pub(crate) const EXIT_USAGE_ERROR: u8 = 2;

/// Why the words are wrong.
#[derive(Debug)]
pub(crate) struct UsageError(String);

impl UsageError {
    /// The error of a command whose words are wrong for this reason.
    pub(crate) fn from_reason(why: impl fmt::Display) -> Error {
        Error::new(Self(why.to_string()))
    }

    /// Whether this is why a command failed.
    pub(crate) fn is_cause_of(error: &Error) -> bool {
        error.downcast_ref::<Self>().is_some()
    }
}

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn usage_errors_are_recognised_in_any_context() {
        let refused: anyhow::Result<()> = Err(UsageError::from_reason("no size"));
        let refused = refused.context("--size").context("a volume").unwrap_err();
        assert!(UsageError::is_cause_of(&refused));
        assert_eq!(format!("{refused:#}"), "a volume: --size: no size");
        assert!(!UsageError::is_cause_of(&anyhow!("a disk is full")));
    }
}
