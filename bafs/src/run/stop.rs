//! What somebody can say who wants a run to end: give it up, and once more to leave at once. What
//! giving up means is the scheduler's to decide.

use std::time::Duration;

use bafs_client::signals::{StopSignal, wait_for_stop_signal};
use bafs_sched::driver::CancelHandle;

/// Signals that come within so long of the first one ask for the same.
const SIGNAL_GRACE: Duration = Duration::from_secs(1);

/// Waits for a run that is cancelled when somebody asks for its end. `hear` is told of the first
/// who does; it need not return. Nothing when somebody asked again, and the run was left.
pub(super) async fn run_until_stopped<T>(
    run: impl Future<Output = T>,
    cancel: &CancelHandle,
    asked: impl Future<Output = StopSignal>,
    hear: impl FnOnce(StopSignal),
) -> Option<T> {
    let left = async {
        hear(asked.await);
        cancel.request_cancel();
        // `timeout` signals a process and then its group: that is one wish.
        tokio::time::sleep(SIGNAL_GRACE).await;
        // Who closes a terminal does not mean what is under way to be left half done.
        while wait_for_stop_signal().await == StopSignal::Hangup {}
    };
    tokio::select! {
        ended = run => Some(ended),
        () = left => None,
    }
}
