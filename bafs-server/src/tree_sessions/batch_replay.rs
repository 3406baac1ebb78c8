//! Memory of answered batches of one session, so that a lost reply never runs a batch twice.
//! Runs nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bafs_proto::Error;
use bafs_proto::file_op::{FileOp, FileReply, FileResult};
use bytes::Bytes;
use tokio::sync::watch;

/// Answers that are kept per session: as many as calls can be under way on all lanes of an agent,
/// so that whatever a cut link loses can be asked for again.
const CACHED_REPLIES_MAX: usize = 4096;

/// Bytes of answers that are kept per session, about.
const CACHED_REPLY_BYTES_MAX: usize = 8 << 20;

/// A longer body of a batch that only reads is not kept: reading again gives it again.
const CACHED_BODY_BYTES_MAX: usize = 64 << 10;

/// Gaps in the numbering that are remembered; a well-behaved agent leaves as many as it has
/// batches on the way.
const GAPS_MAX: u64 = 1 << 16;

/// What a batch answered: the results and the body.
pub(super) type BatchReply = Result<(Vec<FileResult>, Bytes), Error>;

/// Tells those who wait for a batch.
pub(super) type BatchReplySender = watch::Sender<Option<BatchReply>>;

/// Waits for a batch.
pub(super) type BatchReplyReceiver = watch::Receiver<Option<BatchReply>>;

/// What is known of a batch that a caller asks for.
pub(super) enum BatchStart {
    /// Nobody has asked before: run it, then call [`BatchReplay::finish`], then send the answer.
    New(BatchReplySender),
    /// It runs, or has run.
    Existing(BatchReplyReceiver),
    /// It has run, and its answer is no longer kept.
    Forgotten,
}

/// Answers by sequence number.
#[derive(Default)]
pub(super) struct BatchReplay {
    /// Every batch up to this number has begun,
    begun_up_to: u64,
    /// and these beyond it.
    begun_beyond: BTreeSet<u64>,
    replies: BTreeMap<u64, BatchReplyReceiver>,
    /// Batches that have run and may simply run again.
    repeatable: BTreeSet<u64>,
    /// Finished batches with the size of what is kept, oldest first.
    finished: VecDeque<(u64, usize)>,
    finished_bytes: usize,
}

impl BatchReplay {
    /// Whether no batch has begun.
    pub(super) fn is_new(&self) -> bool {
        self.begun_up_to == 0 && self.begun_beyond.is_empty()
    }

    /// Looks a batch up and takes note that it begins if it is new.
    pub(super) fn begin(&mut self, sequence: u64) -> BatchStart {
        if let Some(answer) = self.replies.get(&sequence) {
            return BatchStart::Existing(answer.clone());
        }
        if !self.repeatable.remove(&sequence) {
            if sequence <= self.begun_up_to || self.begun_beyond.contains(&sequence) {
                return BatchStart::Forgotten;
            }
            self.note_begun(sequence);
        }
        let (sender, receiver) = watch::channel(None);
        self.replies.insert(sequence, receiver);
        BatchStart::New(sender)
    }

    fn note_begun(&mut self, sequence: u64) {
        self.begun_beyond.insert(sequence);
        while self.begun_beyond.remove(&(self.begun_up_to + 1)) {
            self.begun_up_to += 1;
        }
        if self.begun_beyond.len() as u64 > GAPS_MAX
            && let Some(first) = self.begun_beyond.pop_first()
        {
            self.begun_up_to = first;
        }
    }

    /// Takes note of the answer and forgets the oldest ones beyond the limits.
    pub(super) fn finish(&mut self, sequence: u64, ops: &[FileOp], answer: &BatchReply) {
        let bytes = reply_bytes(answer);
        if bytes > CACHED_BODY_BYTES_MAX && ops.iter().all(is_read_only) {
            self.replies.remove(&sequence);
            self.repeatable.insert(sequence);
            if self.repeatable.len() > CACHED_REPLIES_MAX {
                self.repeatable.pop_first();
            }
            return;
        }
        self.finished.push_back((sequence, bytes));
        self.finished_bytes += bytes;
        while self.finished.len() > CACHED_REPLIES_MAX
            || self.finished_bytes > CACHED_REPLY_BYTES_MAX
        {
            let Some((oldest, bytes)) = self.finished.pop_front() else {
                break;
            };
            self.replies.remove(&oldest);
            self.finished_bytes -= bytes;
        }
    }
}

/// Whether a batch only makes durable what batches before it did.
pub(super) fn is_sync(ops: &[FileOp]) -> bool {
    let is_sync = |op: &FileOp| matches!(op, FileOp::Fsync { .. });
    !ops.is_empty() && ops.iter().all(is_sync)
}

/// Whether running it once more changes nothing and answers the same or something newer.
fn is_read_only(op: &FileOp) -> bool {
    matches!(
        op,
        FileOp::GetAttr { .. }
            | FileOp::ReadLink { .. }
            | FileOp::Read { .. }
            | FileOp::ReadFile { .. }
            | FileOp::StatFs
            | FileOp::GetXattr { .. }
            | FileOp::ListXattr { .. }
            | FileOp::Seek { .. }
    )
}

/// About how much memory an answer takes, in bytes.
fn reply_bytes(answer: &BatchReply) -> usize {
    let Ok((results, body)) = answer else {
        return size_of::<Error>();
    };
    let more: usize = results.iter().map(name_bytes).sum();
    body.len() + more + results.len() * size_of::<FileResult>()
}

/// About how many bytes the names and values in a result take, encoded or in memory.
pub(super) fn name_bytes(result: &FileResult) -> usize {
    match result {
        Ok(FileReply::Bytes(bytes)) => bytes.len(),
        Ok(FileReply::Entries(entries)) => entries
            .iter()
            .map(|entry| {
                let attr_bytes = if entry.attr.is_some() { 128 } else { 0 };
                32 + attr_bytes + entry.name.len()
            })
            .sum(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::ids::HandleId;

    const READ: FileOp = FileOp::Read {
        handle: HandleId(1),
        offset: 0,
        length: 1,
    };
    const WRITE: FileOp = FileOp::Release {
        handle: HandleId(1),
    };

    fn answer(body_bytes: usize) -> BatchReply {
        Ok((vec![Ok(FileReply::Done)], Bytes::from(vec![0; body_bytes])))
    }

    fn run(replay: &mut BatchReplay, sequence: u64, op: &FileOp, body_bytes: usize) {
        let BatchStart::New(sender) = replay.begin(sequence) else {
            panic!("{sequence} is not new")
        };
        let answer = answer(body_bytes);
        replay.finish(sequence, std::slice::from_ref(op), &answer);
        sender.send_replace(Some(answer));
    }

    #[test]
    fn kept_answers_are_replayed_and_never_rerun() {
        let mut replay = BatchReplay::default();
        for sequence in 1..=4_140 {
            run(&mut replay, sequence, &WRITE, 10);
        }
        assert!(matches!(replay.begin(4_140), BatchStart::Existing(_)));
        assert!(matches!(replay.begin(45), BatchStart::Existing(_)));
        assert!(matches!(replay.begin(44), BatchStart::Forgotten));
        assert!(replay.begun_beyond.is_empty());
    }

    #[test]
    fn batches_may_come_out_of_order() {
        let mut replay = BatchReplay::default();
        for sequence in (2..=5_000).rev() {
            run(&mut replay, sequence, &WRITE, 0);
        }
        assert!(matches!(replay.begin(5_000), BatchStart::Forgotten));
        run(&mut replay, 1, &WRITE, 0);
        assert_eq!(replay.begun_up_to, 5_000);
    }

    #[test]
    fn large_reads_rerun_and_large_writes_are_kept() {
        let mut replay = BatchReplay::default();
        run(&mut replay, 1, &READ, CACHED_BODY_BYTES_MAX + 1);
        run(&mut replay, 1, &READ, CACHED_BODY_BYTES_MAX + 1);
        run(&mut replay, 2, &WRITE, CACHED_BODY_BYTES_MAX + 1);
        assert!(matches!(replay.begin(2), BatchStart::Existing(_)));
    }

    #[test]
    fn memory_is_bounded_in_bytes() {
        let mut replay = BatchReplay::default();
        for sequence in 1..=20 {
            run(&mut replay, sequence, &WRITE, 1 << 20);
        }
        assert!(replay.finished_bytes <= CACHED_REPLY_BYTES_MAX);
        assert!(matches!(replay.begin(1), BatchStart::Forgotten));
        assert!(matches!(replay.begin(20), BatchStart::Existing(_)));
    }

    #[test]
    fn gaps_in_the_numbering_are_bounded() {
        let mut replay = BatchReplay::default();
        for step in 0..GAPS_MAX + 100 {
            replay.note_begun(2 + 2 * step);
        }
        assert!(replay.begun_beyond.len() as u64 <= GAPS_MAX);
    }
}
