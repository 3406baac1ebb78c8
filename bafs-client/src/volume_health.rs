//! Whether a volume is still there: the first loss is recorded, everybody hears of it, and it is
//! final. Decides nothing about jobs.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bafs_proto::{Error, ErrorClass, ErrorCode};
use tokio::sync::{mpsc, watch};

use crate::connection_end::ConnectionEnd;

/// A volume that is lost, with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeLoss {
    /// Name of the mount.
    pub volume: String,
    /// What ended it; the text names the volume as well.
    pub error: Error,
}

/// Health of one volume: it exists, or its first data loss. Clones share it.
#[derive(Debug, Clone)]
pub struct VolumeHealth(Arc<VolumeHealthState>);

/// Says how the kernel's connection of a volume ended; `None` while it is there.
pub(crate) type ConnectionCheck = Box<dyn Fn() -> Option<ConnectionEnd> + Send + Sync>;

struct VolumeHealthState {
    volume: String,
    loss: OnceLock<Error>,
    connection_check: OnceLock<ConnectionCheck>,
    /// The next writer came after the end of the mount.
    has_successor: AtomicBool,
    signal: watch::Sender<bool>,
    losses: mpsc::UnboundedSender<VolumeLoss>,
}

impl std::fmt::Debug for VolumeHealthState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Fate({}, {:?})", self.volume, self.loss)
    }
}

impl VolumeHealth {
    /// The fate of the volume of this name. A loss is sent to `losses`, at most once.
    pub fn new(volume: &str, losses: mpsc::UnboundedSender<VolumeLoss>) -> Self {
        Self(Arc::new(VolumeHealthState {
            volume: volume.to_owned(),
            loss: OnceLock::new(),
            connection_check: OnceLock::new(),
            has_successor: AtomicBool::new(false),
            signal: watch::Sender::new(false),
            losses,
        }))
    }

    /// From now on `check` says how the connection ended. Another writer that comes after an
    /// unmount takes nothing away.
    pub(crate) fn set_connection_check(&self, check: ConnectionCheck) {
        let _ = self.0.connection_check.set(check);
    }

    /// How the kernel's connection ended, as far as that is known; `None` while it is there.
    pub(crate) fn connection_end(&self) -> Option<ConnectionEnd> {
        self.0.connection_check.get().and_then(|check| check())
    }

    /// Whether it was another writer that ended the use of the volume, after its unmount. Whatever
    /// was not brought home by then is lost all the same.
    pub(crate) fn has_successor(&self) -> bool {
        self.0.has_successor.load(Ordering::Acquire)
    }

    /// Records that the volume is lost, unless it was lost before.
    pub fn mark_lost(&self, error: Error) {
        let error = error.context(format_args!("volume {}", self.0.volume));
        let is_succeeded = error.code == ErrorCode::Fenced
            && self.connection_end() == Some(ConnectionEnd::Unmounted);
        if self.0.loss.set(error.clone()).is_ok() {
            if is_succeeded {
                let volume = &self.0.volume;
                tracing::debug!(%volume, %error, "a later writer opened the volume");
                self.0.has_successor.store(true, Ordering::Release);
                self.0.signal.send_replace(true);
                return;
            }
            tracing::warn!(volume = %self.0.volume, %error, "volume lost");
            self.0.signal.send_replace(true);
            // Nobody listens when the job is over already.
            let _ = self.0.losses.send(VolumeLoss {
                volume: self.0.volume.clone(),
                error,
            });
        }
    }

    /// Tells whoever watches the volume, as [`Self::mark_lost`] does, of an error that must not go
    /// unheard although the volume can still be used.
    pub fn report_data_loss(&self, error: Error) {
        if self.loss().is_some() {
            return;
        }
        let error = error.context(format_args!("volume {}", self.0.volume));
        tracing::warn!(volume = %self.0.volume, %error, "data lost");
        // Nobody listens when the job is over already.
        let _ = self.0.losses.send(VolumeLoss {
            volume: self.0.volume.clone(),
            error,
        });
    }

    /// Why the volume is lost; `None` while it is there.
    pub fn loss(&self) -> Option<&Error> {
        self.0.loss.get()
    }

    /// Does `work` while the volume is there; `None` as soon as it is lost.
    pub async fn run_unless_lost<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        let mut signal = self.0.signal.subscribe();
        tokio::select! {
            biased;
            _ = signal.wait_for(|lost| *lost) => None,
            done = work => Some(done),
        }
    }
}

/// Whether a call that failed with this error for good leaves its volume unusable.
///
/// What concerns one file travels as an errno within a successful call. So an error of the call
/// itself concerns the session; only a lack of space is something that a job can live with.
pub fn is_fatal(error: &Error) -> bool {
    match error.class() {
        ErrorClass::NoSpace => false,
        ErrorClass::Transient
        | ErrorClass::VolumeLost
        | ErrorClass::Denied
        | ErrorClass::Invalid => true,
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ErrorCode;

    use super::*;

    #[tokio::test]
    async fn fencing_after_the_unmount_is_no_data_loss() {
        for (code, end, is_succeeded) in [
            (ErrorCode::Fenced, Some(ConnectionEnd::Unmounted), true),
            (ErrorCode::Fenced, Some(ConnectionEnd::Aborted), false),
            (ErrorCode::Fenced, None, false),
            (ErrorCode::VolumeLost, Some(ConnectionEnd::Unmounted), false),
        ] {
            let (losses, mut heard) = mpsc::unbounded_channel();
            let health = VolumeHealth::new("v", losses);
            health.set_connection_check(Box::new(move || end));
            health.mark_lost(Error::new(code, "another"));
            assert_eq!(health.has_successor(), is_succeeded);
            assert_eq!(heard.try_recv().is_err(), is_succeeded, "{code:?}");
            assert!(
                health.loss().is_some(),
                "nothing is asked of the server any more"
            );
        }
    }

    #[tokio::test]
    async fn only_the_first_data_loss_is_reported() {
        let (losses, mut heard) = mpsc::unbounded_channel();
        let health = VolumeHealth::new("raw", losses);
        assert_eq!(health.run_unless_lost(async { 7 }).await, Some(7));
        let waiting = tokio::spawn({
            let health = health.clone();
            async move { health.run_unless_lost(std::future::pending::<()>()).await }
        });
        health.mark_lost(Error::new(ErrorCode::Fenced, "first"));
        health.mark_lost(Error::new(ErrorCode::VolumeLost, "second"));
        assert_eq!(waiting.await.unwrap(), None);
        assert_eq!(health.run_unless_lost(async { 7 }).await, None);
        let loss = heard.recv().await.unwrap();
        assert_eq!(
            (loss.volume.as_str(), loss.error.code),
            ("raw", ErrorCode::Fenced)
        );
        assert!(loss.error.detail.contains("raw"));
        assert_eq!(health.loss(), Some(&loss.error));
        assert!(heard.try_recv().is_err());
    }
}
