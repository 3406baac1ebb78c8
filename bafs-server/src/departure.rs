//! The end of a node: until when it lives, whether it drains, and when it may go. What is copied
//! meanwhile, and which jobs still start, is the scheduler's decision.

use std::time::Duration;

use bafs_proto::message::Lifetime;
use bafs_proto::time::Deadline;
use tokio::sync::watch;

/// A draining node without jobs and scratch volumes serves for so long yet: whoever waits for the
/// end of its last job hears it, and asks for what it left. A scheduler hears of a node's drain
/// within a second, too.
const EMPTY_MS: u64 = 1_500;

/// How often a draining node looks whether it is empty.
const LOOK_MS: u64 = 100;

/// Longest end that a clock can name; a longer one counts as none.
const LIFETIME_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DepartureState {
    /// When it ends, if it knows.
    end: Option<Deadline>,
    is_draining: bool,
    is_restarting: bool,
}

/// When a node leaves. Clones are the same.
#[derive(Debug, Clone)]
pub struct Departure {
    state: watch::Sender<DepartureState>,
    grace: Duration,
}

impl Departure {
    /// A node that lives for `lifetime`, if that is known, and drains in the last `grace` of it.
    pub fn new(lifetime: Option<Duration>, grace: Duration) -> Self {
        let lifetime = lifetime.filter(|lifetime| *lifetime <= LIFETIME_MAX);
        let state = DepartureState {
            end: lifetime.map(Deadline::after),
            is_draining: false,
            is_restarting: false,
        };
        Self {
            state: watch::Sender::new(state),
            grace,
        }
    }

    /// Takes no new work from now on. The node goes on to serve.
    pub fn begin_drain(&self) {
        self.state.send_if_modified(|state| {
            let is_first = !state.is_draining;
            state.is_draining = true;
            is_first
        });
    }

    /// Takes no new work from now on, and ends when the grace is over at the latest.
    pub fn begin_end(&self) {
        let end = Deadline::after(self.grace);
        self.state.send_modify(|state| {
            state.end = Some(state.end.map_or(end, |known| known.earlier_of(end)));
            state.is_draining = true;
        });
    }

    /// Takes no new jobs from now on, and ends when the last one has. Its volumes stay where they
    /// are: the same node comes back.
    pub fn begin_restart(&self) {
        self.state.send_modify(|state| state.is_restarting = true);
    }

    /// The slots that the node offers: none if no more jobs shall start. With those of its jobs, a
    /// scheduler would start the next job wherever one ends.
    pub(crate) fn offered_slots(&self, slots: u32) -> u32 {
        let is_restarting = self.state.borrow().is_restarting;
        if is_restarting { 0 } else { slots }
    }

    /// Wakes when anything of it changes.
    pub(crate) fn changes(&self) -> watch::Receiver<impl Sized + use<>> {
        self.state.subscribe()
    }

    /// Whether the node drains and ends soon, so that jobs end because of it.
    pub(crate) fn interrupts_jobs(&self) -> bool {
        let state = *self.state.borrow();
        state.is_draining && state.end.is_some()
    }

    /// Waits until the node is to end, or `limit` is over; answers whether it is.
    pub(crate) async fn wait_for_interruption(&self, limit: Duration) -> bool {
        let mut states = self.state.subscribe();
        let ends = states.wait_for(|state| state.is_draining && state.end.is_some());
        tokio::time::timeout(limit, ends).await.is_ok()
    }

    /// What the node says of it.
    pub(crate) fn lifetime(&self) -> Lifetime {
        let state = *self.state.borrow();
        let left = state.end.map(|end| match state.is_draining {
            true => end.remaining(),
            false => end.remaining().saturating_sub(self.grace),
        });
        Lifetime {
            left_ms: left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            is_draining: state.is_draining,
        }
    }

    /// Begins the drain when the last part of the lifetime begins.
    pub(crate) async fn drain_in_time(self) {
        let end = self.state.borrow().end;
        let Some(end) = end else {
            return;
        };
        tokio::time::sleep(end.remaining().saturating_sub(self.grace)).await;
        self.begin_drain();
    }

    /// Waits for the end: the deadline, or earlier if the node drains towards one and `is_empty`
    /// holds for a moment, or if it restarts and `is_idle` does.
    pub(crate) async fn wait_for_end(
        &self,
        is_empty: impl Fn() -> bool,
        is_idle: impl Fn() -> bool,
    ) {
        let mut done_ms = 0;
        let mut states = self.state.subscribe();
        loop {
            let ends = states
                .wait_for(|state| state.end.is_some() || state.is_restarting)
                .await;
            // The sender lives as long as this departure.
            let Ok(state) = ends.map(|state| *state) else {
                return;
            };
            let end = state.end.unwrap_or_else(|| Deadline::after(LIFETIME_MAX));
            if end.remaining().is_zero() || done_ms >= EMPTY_MS {
                return;
            }
            if !state.is_draining && !state.is_restarting {
                done_ms = 0;
                tokio::select! {
                    () = tokio::time::sleep(end.remaining()) => {}
                    _ = states.changed() => {}
                }
                continue;
            }
            tokio::time::sleep(Duration::from_millis(LOOK_MS).min(end.remaining())).await;
            let is_done = match state.is_restarting {
                true => is_idle(),
                // A node that only drains stays until somebody ends it.
                false => state.end.is_some() && is_empty(),
            };
            done_ms = if is_done { done_ms + LOOK_MS } else { 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(25);

    #[tokio::test]
    async fn node_without_lifetime_serves_on() {
        let departure = Departure::new(None, GRACE);
        assert_eq!(departure.lifetime(), Lifetime::default());
        departure.begin_drain();
        let lifetime = departure.lifetime();
        assert_eq!((lifetime.left_ms, lifetime.is_draining), (None, true));
        assert!(!departure.interrupts_jobs());
        let ended = departure.wait_for_end(|| true, || true);
        let limit = Duration::from_millis(2 * EMPTY_MS);
        assert!(tokio::time::timeout(limit, ended).await.is_err());
    }

    #[tokio::test]
    async fn lifetime_for_jobs_excludes_the_grace() {
        let departure = Departure::new(Some(Duration::from_secs(100)), GRACE);
        let left_ms = departure.lifetime().left_ms.expect("an end");
        assert!((74_000..=75_000).contains(&left_ms), "{left_ms}");
        departure.begin_drain();
        let left_ms = departure.lifetime().left_ms.expect("an end");
        assert!((99_000..=100_000).contains(&left_ms), "{left_ms}");
    }

    #[tokio::test]
    async fn empty_node_ends_before_its_grace() {
        let departure = Departure::new(None, Duration::from_secs(600));
        departure.begin_end();
        assert!(departure.interrupts_jobs());
        let ended = departure.wait_for_end(|| true, || true);
        let limit = Duration::from_millis(10 * EMPTY_MS);
        assert!(tokio::time::timeout(limit, ended).await.is_ok());
    }

    #[tokio::test]
    async fn end_comes_with_the_deadline() {
        let departure = Departure::new(None, Duration::from_millis(300));
        departure.begin_end();
        let ended = departure.wait_for_end(|| false, || false);
        let limit = Duration::from_secs(20);
        assert!(tokio::time::timeout(limit, ended).await.is_ok());
    }

    #[tokio::test]
    async fn later_request_never_delays_the_end() {
        let departure = Departure::new(Some(Duration::from_secs(5)), GRACE);
        departure.begin_end();
        let left_ms = departure.lifetime().left_ms.expect("an end");
        assert!(left_ms <= 5_000, "{left_ms}");
    }

    #[tokio::test]
    async fn restarting_node_waits_for_its_jobs() {
        let departure = Departure::new(None, GRACE);
        departure.begin_restart();
        assert_eq!(departure.lifetime(), Lifetime::default());
        assert_eq!(departure.offered_slots(8), 0);
        let limit = Duration::from_millis(2 * EMPTY_MS);
        let busy = departure.wait_for_end(|| false, || false);
        assert!(tokio::time::timeout(limit, busy).await.is_err());
        let idle = departure.wait_for_end(|| false, || true);
        assert!(tokio::time::timeout(limit, idle).await.is_ok());
        assert!(!departure.interrupts_jobs());
    }
}
