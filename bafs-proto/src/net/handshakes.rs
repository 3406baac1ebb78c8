//! Handshakes in progress, which any client may begin: their number and their time are bounded.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::task::AbortHandle;

use super::hello::HELLO_TIMEOUT_MS;
use crate::error::{Error, ErrorCode, Result};

/// Handshakes in progress at once. One more evicts the oldest, which is the slowest and the least
/// likely to be legitimate.
const HANDSHAKES_MAX: usize = 256;

/// The handshakes of a listener, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Handshakes(VecDeque<AbortHandle>);

impl Handshakes {
    /// Handshakes in progress.
    pub(super) fn count(&mut self) -> usize {
        self.0.retain(|handshake| !handshake.is_finished());
        self.0.len()
    }

    /// Runs `greeting` concurrently with other handshakes, and then `serving` with its result.
    pub(super) fn start<T: Send + 'static, S: Future<Output = Error> + Send + 'static>(
        &mut self,
        greeting: impl Future<Output = Result<T>> + Send + 'static,
        serving: impl FnOnce(T) -> S + Send + 'static,
    ) {
        if self.count() >= HANDSHAKES_MAX
            && let Some(oldest) = self.0.pop_front()
        {
            oldest.abort();
        }
        let handshake = tokio::spawn(async move {
            let greeted = tokio::time::timeout(Duration::from_millis(HELLO_TIMEOUT_MS), greeting)
                .await
                .unwrap_or_else(|_| Err(Error::new(ErrorCode::DeadlineExceeded, "no hello came")));
            match greeted {
                Ok(greeted) => {
                    let serving = serving(greeted);
                    tokio::spawn(async move {
                        let ended = serving.await;
                        tracing::debug!(error = %ended, "connection ended");
                    });
                }
                Err(error) => tracing::debug!(%error, "connection refused"),
            }
        });
        self.0.push_back(handshake.abort_handle());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn excess_handshakes_evict_older_ones() {
        let mut handshakes = Handshakes::default();
        let never = || std::future::pending::<Result<()>>();
        for _ in 0..2 * HANDSHAKES_MAX {
            handshakes.start(never(), |()| std::future::pending());
        }
        tokio::task::yield_now().await;
        assert_eq!(handshakes.count(), HANDSHAKES_MAX);
    }
}
