//! How many streams of events each user has open. Streams nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Streams of one user at once: each has a connection and looks at its run by itself. A user of the
/// page has one for each tab.
const STREAMS_OF_USER_MAX: usize = 12;

/// Streams of all users at once: a quarter of the connections stays for requests.
const STREAMS_MAX: usize = 96;

/// The open streams of all users.
#[derive(Debug, Clone, Default)]
pub(crate) struct OpenStreams(Arc<Mutex<BTreeMap<String, usize>>>);

/// A stream; it counts until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenStream {
    streams: OpenStreams,
    user: String,
}

impl OpenStreams {
    /// Opens a stream of a user; nothing if there are too many.
    pub(crate) fn open(&self, user: &str) -> Option<OpenStream> {
        let mut counts = self.counts();
        let all: usize = counts.values().sum();
        let own = counts.get(user).copied().unwrap_or(0);
        if own >= STREAMS_OF_USER_MAX || all >= STREAMS_MAX {
            return None;
        }
        counts.insert(user.to_owned(), own + 1);
        Some(OpenStream {
            streams: self.clone(),
            user: user.to_owned(),
        })
    }

    /// Whether any is open.
    pub(crate) fn has_any(&self) -> bool {
        !self.counts().is_empty()
    }

    fn counts(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        let mut counts = self.streams.counts();
        let left = counts
            .get(&self.user)
            .map_or(0, |own| own.saturating_sub(1));
        match left {
            0 => drop(counts.remove(&self.user)),
            left => drop(counts.insert(self.user.clone(), left)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_takes_no_streams_from_others() {
        let streams = OpenStreams::default();
        let mut his: Vec<_> = (0..100).filter_map(|_| streams.open("bob")).collect();
        assert_eq!(his.len(), STREAMS_OF_USER_MAX);
        let hers = streams.open("ann");
        assert!(hers.is_some());
        his.pop();
        assert!(streams.open("bob").is_some(), "one has ended");
        drop((his, hers));
        assert!(!streams.has_any());
    }

    #[test]
    fn all_streams_together_are_bounded() {
        let streams = OpenStreams::default();
        let user = |number: usize| format!("user{number}");
        let open: Vec<_> = (0..1_000)
            .filter_map(|number| streams.open(&user(number)))
            .collect();
        assert_eq!(open.len(), STREAMS_MAX);
    }
}
