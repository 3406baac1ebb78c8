//! A breach of a rule: where it is, and what to do. Checks nothing.

use std::fmt;

/// One breach of a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RuleViolation {
    /// The file, as seen from the root of the checkout.
    pub(super) path: String,
    /// The line, from 1; 0 when the file as a whole is meant.
    pub(super) line: usize,
    /// What is wrong and what to do.
    pub(super) message: String,
}

impl RuleViolation {
    pub(super) fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line,
            message: message.into(),
        }
    }
}

impl fmt::Display for RuleViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 {
            write!(f, "{}: {}", self.path, self.message)
        } else {
            write!(f, "{}:{}: {}", self.path, self.line, self.message)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_names_its_location() {
        assert_eq!(
            RuleViolation::new("a.rs", 3, "bad").to_string(),
            "a.rs:3: bad"
        );
        assert_eq!(
            RuleViolation::new("a.rs", 0, "bad").to_string(),
            "a.rs: bad"
        );
    }
}
