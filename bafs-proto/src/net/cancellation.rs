//! Whether the caller of a request still waits for its answer. Ends nothing by itself: a service
//! looks where a request may wait for long before anything of it is done.

use tokio::sync::watch;

/// Held while the caller waits, and dropped when it leaves.
#[derive(Debug)]
pub struct CancelGuard {
    _alive: watch::Sender<()>,
}

/// The caller's state, as the service of a request sees it.
#[derive(Debug, Clone)]
pub struct Cancellation(watch::Receiver<()>);

impl Cancellation {
    /// A caller that waits as long as the other half is kept.
    pub fn new() -> (CancelGuard, Self) {
        let (alive, seen) = watch::channel(());
        (CancelGuard { _alive: alive }, Self(seen))
    }

    /// Returns when the caller no longer waits for the answer.
    pub async fn cancelled(mut self) {
        while self.0.changed().await.is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn dropping_the_waiting_half_ends_the_wait() {
        let (waiting, awaited) = Cancellation::new();
        let over = tokio::spawn(awaited.clone().cancelled());
        tokio::task::yield_now().await;
        assert!(!over.is_finished());
        drop(waiting);
        over.await.unwrap();
        awaited.cancelled().await;
    }
}
