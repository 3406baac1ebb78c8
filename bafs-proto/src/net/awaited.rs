//! Whether the caller of a request still waits for its answer. Ends nothing by itself: a service
//! looks where a request may wait for long before anything of it is done.

use tokio::sync::watch;

/// Kept while the caller waits; the caller has gone when it is dropped.
#[derive(Debug)]
pub struct Waiting {
    _alive: watch::Sender<()>,
}

/// What the service of a request knows of its caller.
#[derive(Debug, Clone)]
pub struct Awaited(watch::Receiver<()>);

impl Awaited {
    /// A caller that waits as long as the other half is kept.
    pub fn new() -> (Waiting, Self) {
        let (alive, seen) = watch::channel(());
        (Waiting { _alive: alive }, Self(seen))
    }

    /// Returns when nobody waits for the answer any more.
    pub async fn is_over(mut self) {
        while self.0.changed().await.is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_caller_has_gone_when_its_half_is_dropped() {
        let (waiting, awaited) = Awaited::new();
        let over = tokio::spawn(awaited.clone().is_over());
        tokio::task::yield_now().await;
        assert!(!over.is_finished());
        drop(waiting);
        over.await.unwrap();
        awaited.is_over().await;
    }
}
