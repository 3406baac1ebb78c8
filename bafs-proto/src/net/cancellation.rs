//! Whether the caller of a request still waits for its answer. Ends nothing by itself: a service
//! looks where a request may wait for long before anything of it is done.

use tokio::sync::watch;

/// Kept while the caller waits; the caller has gone when it is dropped.
#[derive(Debug)]
pub struct CancelGuard {
    _alive: watch::Sender<()>,
}

/// What the service of a request knows of its caller.
#[derive(Debug, Clone)]
pub struct Cancellation(watch::Receiver<()>);

impl Cancellation {
    /// A caller that waits as long as the other half is kept.
    pub fn new() -> (CancelGuard, Self) {
        let (alive, seen) = watch::channel(());
        (CancelGuard { _alive: alive }, Self(seen))
    }

    /// Returns when nobody waits for the answer any more.
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
