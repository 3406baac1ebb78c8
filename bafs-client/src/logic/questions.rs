//! Which of the server's answers are still true when they come: programs go on meanwhile, and what
//! they were told first counts. Knows no operation.

use std::collections::BTreeMap;

use bafs_proto::ids::InodeNo;

/// Files whose change is remembered while questions are under way, at about 50 bytes.
const CHANGED_MAX: usize = 4096;

/// The questions under way, and what changed since the oldest of them.
#[derive(Debug, Default)]
pub struct Questions {
    /// Counts changes of files.
    changes: u64,
    /// Files that changed, with the count at their last change.
    changed: BTreeMap<InodeNo, u64>,
    /// Answers to questions from before this count teach nothing.
    since: u64,
    under_way: usize,
    /// How many of them change a file.
    changing: BTreeMap<InodeNo, u32>,
    /// How many of them change files that nobody knows.
    changing_any: u32,
}

/// Something that the server is asked.
#[derive(Debug)]
#[must_use = "a question that is not ended is taken to be under way"]
pub struct Question {
    asked_at: u64,
    unsettled: Option<u64>,
    changing: Vec<InodeNo>,
    changes_any: bool,
}

impl Question {
    /// The same, of a file that nobody knows, while the server had not run all before a position
    /// of the log.
    pub fn before(mut self, unsettled: Option<u64>) -> Self {
        self.unsettled = unsettled;
        self
    }

    /// What had to run before the answer is sure to be true, where that was not known when it was
    /// asked: a position of the log.
    pub fn unsettled(&self) -> Option<u64> {
        self.unsettled
    }

    /// Whether it may change files that nobody knows.
    pub fn changes_any(&self) -> bool {
        self.changes_any
    }
}

impl Questions {
    /// A question begins that may change these files, or any.
    pub fn begin(&mut self, mut changing: Vec<InodeNo>, changes_any: bool) -> Question {
        changing.sort();
        changing.dedup();
        self.under_way += 1;
        for ino in &changing {
            self.change(*ino);
            *self.changing.entry(*ino).or_default() += 1;
        }
        if changes_any {
            self.change_all();
            self.changing_any += 1;
        }
        Question {
            asked_at: self.changes,
            unsettled: None,
            changing,
            changes_any,
        }
    }

    /// A file changed.
    pub fn change(&mut self, ino: InodeNo) {
        self.changes += 1;
        if self.under_way == 0 {
            return;
        }
        if self.changed.len() >= CHANGED_MAX && !self.changed.contains_key(&ino) {
            self.change_all();
        } else {
            self.changed.insert(ino, self.changes);
        }
    }

    /// Nobody knows which files changed.
    fn change_all(&mut self) {
        self.changes += 1;
        self.since = self.changes;
        self.changed.clear();
    }

    /// Whether what the answer to a question says of a file is true now, other than by what the
    /// question itself changed.
    pub fn is_true(&self, question: &Question, ino: InodeNo) -> bool {
        let changed = self.changed.get(&ino).copied().unwrap_or(0);
        let by_itself = u32::from(question.changing.contains(&ino));
        let changing = self.changing.get(&ino).copied().unwrap_or(0);
        changed.max(self.since) <= question.asked_at
            && changing <= by_itself
            && self.changing_any <= u32::from(question.changes_any)
    }

    /// A question was answered, and what it teaches was learned; it has changed these files too.
    pub fn end(&mut self, question: Question, changed: Vec<InodeNo>) {
        for ino in changed {
            self.change(ino);
        }
        if question.changes_any {
            self.changing_any -= 1;
            self.change_all();
        }
        for ino in question.changing {
            self.change(ino);
            if let Some(count) = self.changing.get_mut(&ino) {
                *count -= 1;
                if *count == 0 {
                    self.changing.remove(&ino);
                }
            }
        }
        self.under_way -= 1;
        if self.under_way == 0 {
            self.changed.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: InodeNo = InodeNo(1);
    const TWO: InodeNo = InodeNo(2);

    #[test]
    fn an_answer_is_true_unless_its_file_changed_meanwhile() {
        let mut questions = Questions::default();
        questions.change(ONE);
        let question = questions.begin(Vec::new(), false);
        assert!(questions.is_true(&question, ONE));
        questions.change(ONE);
        assert!(!questions.is_true(&question, ONE));
        assert!(questions.is_true(&question, TWO));
        let later = questions.begin(Vec::new(), false);
        assert!(questions.is_true(&later, ONE));
        let any = questions.begin(Vec::new(), true);
        assert!(questions.is_true(&any, TWO));
        assert!(!questions.is_true(&later, TWO));
        let meanwhile = questions.begin(Vec::new(), false);
        questions.end(any, Vec::new());
        assert!(!questions.is_true(&meanwhile, TWO));
        questions.end(meanwhile, Vec::new());
        questions.end(question, Vec::new());
        questions.end(later, Vec::new());
        assert_eq!((questions.under_way, questions.changed.len()), (0, 0));
    }

    #[test]
    fn what_another_question_changes_is_known_to_none_but_it() {
        let mut questions = Questions::default();
        let reads = questions.begin(Vec::new(), false);
        let changes = questions.begin(vec![ONE, ONE], false);
        let reads_later = questions.begin(Vec::new(), false);
        assert!(questions.is_true(&changes, ONE));
        assert!(!questions.is_true(&reads, ONE));
        assert!(!questions.is_true(&reads_later, ONE));
        questions.end(changes, Vec::new());
        // Whether it was asked before or after that ran nobody can tell.
        assert!(!questions.is_true(&reads_later, ONE));
        let after = questions.begin(vec![ONE], false);
        assert!(questions.is_true(&after, ONE));
        let both = questions.begin(vec![ONE], false);
        assert!(!questions.is_true(&after, ONE));
        for question in [reads, reads_later, after, both] {
            questions.end(question, Vec::new());
        }
        assert!(questions.changing.is_empty());
    }

    #[test]
    fn too_many_changes_are_taken_for_changes_of_all() {
        let mut questions = Questions::default();
        let question = questions.begin(Vec::new(), false);
        for ino in 0..=CHANGED_MAX as u64 {
            questions.change(InodeNo(10 + ino));
        }
        assert!(!questions.is_true(&question, ONE));
        let later = questions.begin(Vec::new(), false);
        assert!(questions.is_true(&later, ONE));
        questions.end(question, Vec::new());
        questions.end(later, Vec::new());
    }
}
