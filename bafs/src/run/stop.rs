//! What somebody can say who wants a run to end: give it up, and once more to leave at once. What
//! giving up means is the scheduler's to decide.

use std::time::Duration;

use bafs_client::signals::{StopSignal, wait_for_stop_signal};
use bafs_sched::Settings;
use bafs_sched::driver::CancelHandle;

use crate::output::print_notice;

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

/// For how long nodes surely keep the volumes of a run whose scheduler has just ended: its last
/// sign of interest may be as old as the pause between two, a quarter of what a volume then lives.
pub(super) fn volume_lifetime_left_ms(settings: &Settings) -> u64 {
    settings.volume_lifetime_ms - settings.volume_lifetime_ms / 4
}

/// Says what happens to a run that somebody asked to stop. Unless by Ctrl-C, nobody has given the
/// run up: a terminal was closed, or the machine stops. Then it is left as it is.
pub(super) fn tell_of_stop(asked: StopSignal, left_ms: u64) {
    if asked != StopSignal::Interrupt {
        print_notice(&format!(
            "the run is suspended: repeat the command within {} minutes to resume it; then Ctrl-C \
             cancels it",
            left_ms / 60_000
        ));
        std::process::exit(asked.exit_code());
    }
    print_notice(
        "stopping the jobs, and deleting the volumes that save no work; press Ctrl-C again to \
         leave at once",
    );
}
