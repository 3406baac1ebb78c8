//! Which of the server's answers are still true when they come: programs go on meanwhile, and what
//! they were told first counts. Knows no operation.

use std::collections::BTreeMap;

use bafs_proto::ids::InodeNo;

/// Files whose change is remembered while questions are under way, at about 50 bytes.
const REMEMBERED_CHANGES_MAX: usize = 4096;

/// The questions under way, and what changed since the oldest of them.
#[derive(Debug, Default)]
pub struct InflightQueries {
    /// Counts changes of files.
    change_count: u64,
    /// Files that changed, with the count at their last change.
    last_changes: BTreeMap<InodeNo, u64>,
    /// Answers to questions from before this count teach nothing.
    valid_since: u64,
    inflight_count: usize,
    /// How many of them change a file.
    changing_files: BTreeMap<InodeNo, u32>,
    /// How many of them change files that nobody knows.
    changing_any_count: u32,
}

/// Something that the server is asked.
#[derive(Debug)]
#[must_use = "a question that is not ended is taken to be under way"]
pub struct InflightQuery {
    begun_at: u64,
    awaited_position: Option<u64>,
    changing_files: Vec<InodeNo>,
    can_change_any: bool,
}

impl InflightQuery {
    /// The same, of a file that nobody knows, while the server had not run all before a position
    /// of the log.
    pub fn with_awaited_position(mut self, unsettled: Option<u64>) -> Self {
        self.awaited_position = unsettled;
        self
    }

    /// What had to run before the answer is sure to be true, where that was not known when it was
    /// asked: a position of the log.
    pub fn awaited_position(&self) -> Option<u64> {
        self.awaited_position
    }

    /// Whether it may change files that nobody knows.
    pub fn can_change_any(&self) -> bool {
        self.can_change_any
    }
}

impl InflightQueries {
    /// A question begins that may change these files, or any.
    pub fn begin_query(
        &mut self,
        mut changing: Vec<InodeNo>,
        can_change_any: bool,
    ) -> InflightQuery {
        changing.sort();
        changing.dedup();
        self.inflight_count += 1;
        for ino in &changing {
            self.record_change(*ino);
            *self.changing_files.entry(*ino).or_default() += 1;
        }
        if can_change_any {
            self.record_change_of_all();
            self.changing_any_count += 1;
        }
        InflightQuery {
            begun_at: self.change_count,
            awaited_position: None,
            changing_files: changing,
            can_change_any,
        }
    }

    /// A file changed.
    pub fn record_change(&mut self, ino: InodeNo) {
        self.change_count += 1;
        if self.inflight_count == 0 {
            return;
        }
        if self.last_changes.len() >= REMEMBERED_CHANGES_MAX
            && !self.last_changes.contains_key(&ino)
        {
            self.record_change_of_all();
        } else {
            self.last_changes.insert(ino, self.change_count);
        }
    }

    /// Nobody knows which files changed.
    fn record_change_of_all(&mut self) {
        self.change_count += 1;
        self.valid_since = self.change_count;
        self.last_changes.clear();
    }

    /// Whether what the answer to a question says of a file is true now, other than by what the
    /// question itself changed.
    pub fn is_current(&self, query: &InflightQuery, ino: InodeNo) -> bool {
        let changed = self.last_changes.get(&ino).copied().unwrap_or(0);
        let by_itself = u32::from(query.changing_files.contains(&ino));
        let changing = self.changing_files.get(&ino).copied().unwrap_or(0);
        changed.max(self.valid_since) <= query.begun_at
            && changing <= by_itself
            && self.changing_any_count <= u32::from(query.can_change_any)
    }

    /// A question was answered, and what it teaches was learned; it has changed these files too.
    pub fn end_query(&mut self, query: InflightQuery, changed: Vec<InodeNo>) {
        for ino in changed {
            self.record_change(ino);
        }
        if query.can_change_any {
            self.changing_any_count -= 1;
            self.record_change_of_all();
        }
        for ino in query.changing_files {
            self.record_change(ino);
            if let Some(count) = self.changing_files.get_mut(&ino) {
                *count -= 1;
                if *count == 0 {
                    self.changing_files.remove(&ino);
                }
            }
        }
        self.inflight_count -= 1;
        if self.inflight_count == 0 {
            self.last_changes.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: InodeNo = InodeNo(1);
    const TWO: InodeNo = InodeNo(2);

    #[test]
    fn an_answer_is_valid_unless_its_file_changed() {
        let mut questions = InflightQueries::default();
        questions.record_change(ONE);
        let question = questions.begin_query(Vec::new(), false);
        assert!(questions.is_current(&question, ONE));
        questions.record_change(ONE);
        assert!(!questions.is_current(&question, ONE));
        assert!(questions.is_current(&question, TWO));
        let later = questions.begin_query(Vec::new(), false);
        assert!(questions.is_current(&later, ONE));
        let any = questions.begin_query(Vec::new(), true);
        assert!(questions.is_current(&any, TWO));
        assert!(!questions.is_current(&later, TWO));
        let meanwhile = questions.begin_query(Vec::new(), false);
        questions.end_query(any, Vec::new());
        assert!(!questions.is_current(&meanwhile, TWO));
        questions.end_query(meanwhile, Vec::new());
        questions.end_query(question, Vec::new());
        questions.end_query(later, Vec::new());
        assert_eq!(
            (questions.inflight_count, questions.last_changes.len()),
            (0, 0)
        );
    }

    #[test]
    fn concurrent_changes_invalidate_answers_of_others() {
        let mut questions = InflightQueries::default();
        let reads = questions.begin_query(Vec::new(), false);
        let changes = questions.begin_query(vec![ONE, ONE], false);
        let reads_later = questions.begin_query(Vec::new(), false);
        assert!(questions.is_current(&changes, ONE));
        assert!(!questions.is_current(&reads, ONE));
        assert!(!questions.is_current(&reads_later, ONE));
        questions.end_query(changes, Vec::new());
        // Whether it was asked before or after that ran nobody can tell.
        assert!(!questions.is_current(&reads_later, ONE));
        let after = questions.begin_query(vec![ONE], false);
        assert!(questions.is_current(&after, ONE));
        let both = questions.begin_query(vec![ONE], false);
        assert!(!questions.is_current(&after, ONE));
        for question in [reads, reads_later, after, both] {
            questions.end_query(question, Vec::new());
        }
        assert!(questions.changing_files.is_empty());
    }

    #[test]
    fn too_many_changes_invalidate_all_answers() {
        let mut questions = InflightQueries::default();
        let question = questions.begin_query(Vec::new(), false);
        for ino in 0..=REMEMBERED_CHANGES_MAX as u64 {
            questions.record_change(InodeNo(10 + ino));
        }
        assert!(!questions.is_current(&question, ONE));
        let later = questions.begin_query(Vec::new(), false);
        assert!(questions.is_current(&later, ONE));
        questions.end_query(question, Vec::new());
        questions.end_query(later, Vec::new());
    }
}
