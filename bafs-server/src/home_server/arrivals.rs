//! Uploads that come in while this server runs: the order of their pieces, and their digest as the
//! bytes come. Knows no rights and no target; what came to an earlier server is not known here.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use bafs_proto::Result;
use bafs_proto::hash::DigestHasher;
use bafs_proto::ids::ExtractionId;
use bafs_proto::limits::PUT_REORDER_BYTES_MAX;
use bafs_proto::time::Deadline;
use tokio::sync::watch;

use super::upload::Content;

/// Uploads that are kept in mind; of more, the bytes are read once more at the end, and pieces that
/// overtake others are refused.
const ARRIVALS_MAX: usize = 256;

/// An upload that is coming in.
#[derive(Debug)]
pub(super) struct Arrival {
    /// Where the file shall be.
    pub(super) path: String,
    file: File,
    received_bytes: u64,
    /// Of all bytes; `None` when some came to an earlier server.
    hasher: Option<DigestHasher>,
}

impl Arrival {
    /// Goes on where `file` ends.
    pub(super) fn new(path: String, file: File) -> io::Result<Self> {
        let received_bytes = file.metadata()?.len();
        Ok(Self {
            path,
            file,
            received_bytes,
            hasher: (received_bytes == 0).then(DigestHasher::new),
        })
    }

    pub(super) fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// Takes what follows on what is here. What is here already stays: it is hashed.
    pub(super) fn add(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let known = usize::try_from(self.received_bytes - offset).unwrap_or(usize::MAX);
        let Some(fresh) = data.get(known..) else {
            return Ok(());
        };
        if self.file.metadata()?.len() != self.received_bytes {
            // Beyond the end it would leave a hole, of which the digest knows nothing.
            let text = "another home server changed what was received; it is taken up anew";
            return Err(io::Error::other(text));
        }
        self.file.write_all_at(fresh, self.received_bytes)?;
        self.received_bytes += fresh.len() as u64;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(fresh);
        }
        Ok(())
    }

    /// Size and digest of what is here, if all of it came to this server.
    pub(super) fn seen(&self) -> Option<Content> {
        let digest = self.hasher.as_ref()?.digest();
        let size = self.received_bytes;
        Some(Content { size, digest })
    }
}

/// The place of an upload, whether it is coming in or not.
#[derive(Debug, Default)]
struct Slot {
    arrival: Mutex<Option<Arrival>>,
    /// Where the file shall be, for who does not wait for the arrival.
    path: OnceLock<String>,
    /// `None` when nothing comes in: what waits for its turn then waits for nothing.
    received_bytes: watch::Sender<Option<u64>>,
}

/// All uploads that are coming in or acted on.
#[derive(Debug, Default)]
pub(super) struct Arrivals(Mutex<BTreeMap<ExtractionId, Arc<Slot>>>);

impl Arrivals {
    /// Runs `act` while nobody else acts on the same upload.
    pub(super) fn locked<T>(
        &self,
        extract: ExtractionId,
        act: impl FnOnce(&mut Option<Arrival>) -> Result<T>,
    ) -> Result<T> {
        let slot = self.slots().entry(extract).or_default().clone();
        let mut arrival = slot.arrival.lock().unwrap_or_else(PoisonError::into_inner);
        let result = act(&mut arrival);
        if let Some(arrival) = arrival.as_ref() {
            slot.path.get_or_init(|| arrival.path.clone());
        }
        let received_bytes = arrival.as_ref().map(Arrival::received_bytes);
        slot.received_bytes.send_replace(received_bytes);
        drop(arrival);
        let mut slots = self.slots();
        // The table's and this one: nobody else waits.
        if received_bytes.is_none() && Arc::strong_count(&slot) == 2 {
            slots.remove(&extract);
        }
        while slots.len() > ARRIVALS_MAX {
            // Who acts on one, or waits for its turn, has it, too. From here on, or it would always
            // be the same.
            let mut others = slots.range(extract..).chain(slots.range(..extract));
            let idle = others.find(|(_, slot)| Arc::strong_count(slot) == 1);
            let Some(idle) = idle.map(|(other, _)| *other) else {
                break;
            };
            slots.remove(&idle);
        }
        result
    }

    /// Where an upload goes that came in. It may have ended meanwhile.
    pub(super) fn path(&self, extract: ExtractionId) -> Option<String> {
        self.slots().get(&extract)?.path.get().cloned()
    }

    /// Waits until the bytes before `offset` are here, unless they are too many to be on their way:
    /// the pieces of an upload are under way together and may overtake each other.
    pub(super) async fn turn(&self, extract: ExtractionId, offset: u64, deadline: Deadline) {
        let Some(slot) = self.slots().get(&extract).cloned() else {
            return;
        };
        let mut received = slot.received_bytes.subscribe();
        let is_turn = |received: &Option<u64>| {
            let ahead = received.map_or(0, |received| offset.saturating_sub(received));
            ahead == 0 || ahead > u64::from(PUT_REORDER_BYTES_MAX)
        };
        let waiting = received.wait_for(is_turn);
        // Whoever waited in vain is told so when its bytes are refused.
        let _ = tokio::time::timeout_at(deadline.instant().into(), waiting).await;
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<ExtractionId, Arc<Slot>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn uploads_with_waiting_chunks_are_not_evicted() {
        let arrivals = Arc::new(Arrivals::default());
        let begin = |number: u128| {
            let begun = arrivals.locked(ExtractionId(number), |slot| {
                let file = tempfile::tempfile().expect("file");
                *slot = Some(Arrival::new("f".to_owned(), file).expect("arrival"));
                Ok(())
            });
            begun.expect("begin");
        };
        let awaited = 7;
        begin(awaited);
        let (later, extract) = (Arc::clone(&arrivals), ExtractionId(awaited));
        let waiting = async move { later.turn(extract, 4, Deadline::after_ms(600_000)).await };
        let waiting = tokio::spawn(waiting);
        tokio::task::yield_now().await;
        for number in 0..2 * ARRIVALS_MAX as u128 {
            if number != awaited {
                begin(number);
            }
        }
        assert_eq!(arrivals.slots().len(), ARRIVALS_MAX);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "its turn has not come");
        let added = arrivals.locked(extract, |slot| {
            let arrival = slot.as_mut().expect("it is kept");
            Ok(arrival.add(0, b"data"))
        });
        added.expect("locked").expect("add");
        let turn = tokio::time::timeout(Duration::from_secs(20), waiting).await;
        turn.expect("it waits no longer").expect("join");
    }
}
