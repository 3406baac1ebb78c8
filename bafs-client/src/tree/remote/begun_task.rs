//! A future that any thread begins, and goes on with. What wakes it has the runtime go on.
//!
//! A thread of the kernel's requests sends to the server by itself: to have a thread of the runtime
//! do so would take a wake-up, which costs as much as the message. And there is no thread to wake
//! up before the answer is there, as for a task of the runtime that was just spawned.

use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::{Context, Wake, Waker};

use tokio::runtime::Handle;

type StoredFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A future, and whether somebody is about to go on with it.
pub(super) struct BegunTask {
    runtime: Handle,
    /// Nothing when it has ended.
    future: Mutex<Option<StoredFuture>>,
    /// Whoever set it goes on with the future; what wakes it meanwhile need not.
    is_scheduled: AtomicBool,
    is_stopped: AtomicBool,
}

impl std::fmt::Debug for BegunTask {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BegunTask")
    }
}

/// Runs a future to its first wait in this thread, and further in the runtime.
pub(super) fn begin_here(runtime: &Handle, future: impl Future<Output = ()> + Send + 'static) {
    let task = BegunTask::new(runtime.clone(), future);
    task.run_here(task.lock());
}

impl BegunTask {
    fn new(runtime: Handle, future: impl Future<Output = ()> + Send + 'static) -> Arc<Self> {
        Arc::new(Self {
            runtime,
            future: Mutex::new(Some(Box::pin(future))),
            is_scheduled: AtomicBool::new(true),
            is_stopped: AtomicBool::new(false),
        })
    }

    /// Runs a future in the runtime, where nobody goes on with it by [`Self::wake_here`].
    pub(super) fn spawn(
        runtime: &Handle,
        future: impl Future<Output = ()> + Send + 'static,
    ) -> Arc<Self> {
        let task = Self::new(runtime.clone(), future);
        task.run_in_runtime();
        task
    }

    /// Wakes the future by `wake`, and goes on with it in this thread. Where another thread is at
    /// it, the runtime does so instead.
    pub(super) fn wake_here(self: &Arc<Self>, wake: impl FnOnce()) {
        let is_scheduled = self.is_scheduled.swap(true, Ordering::AcqRel);
        wake();
        if is_scheduled {
            return;
        }
        match self.future.try_lock() {
            Ok(future) => self.run_here(future),
            Err(TryLockError::Poisoned(poisoned)) => self.run_here(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => self.run_in_runtime(),
        }
    }

    /// Ends the future where it waits.
    pub(super) fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
        // Whoever runs it sees that.
        if let Ok(mut future) = self.future.try_lock() {
            drop(future.take());
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<StoredFuture>> {
        // A panic leaves nothing there.
        self.future.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_in_runtime(self: &Arc<Self>) {
        let task = Arc::clone(self);
        self.runtime
            .spawn(async move { task.run_here(task.lock()) });
    }

    fn run_here(self: &Arc<Self>, mut slot: MutexGuard<'_, Option<StoredFuture>>) {
        // What wakes it from here on may be too late for this time; what did so before is seen.
        self.is_scheduled.swap(false, Ordering::AcqRel);
        // After a panic it is not there any more.
        let Some(mut future) = slot.take() else {
            return;
        };
        let _runtime = self.runtime.enter();
        let waker = Waker::from(Arc::clone(self));
        let mut context = Context::from_waker(&waker);
        let is_pending = future.as_mut().poll(&mut context).is_pending();
        if is_pending && !self.is_stopped.load(Ordering::Acquire) {
            *slot = Some(future);
        }
    }
}

impl Wake for BegunTask {
    fn wake(self: Arc<Self>) {
        if !self.is_scheduled.swap(true, Ordering::AcqRel) {
            self.run_in_runtime();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::{self, ThreadId};
    use std::time::Duration;

    use tokio::runtime::Runtime;
    use tokio::sync::{Notify, oneshot};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn runtime() -> Runtime {
        let mut building = tokio::runtime::Builder::new_multi_thread();
        building.worker_threads(2).build().expect("a runtime")
    }

    #[test]
    fn a_future_begins_in_the_calling_thread() {
        let runtime = runtime();
        let (tell, told) = mpsc::channel();
        let (answer, answered) = oneshot::channel::<()>();
        begin_here(runtime.handle(), async move {
            tell.send(thread::current().id()).expect("the test waits");
            answered.await.expect("it is answered");
            tell.send(thread::current().id()).expect("the test waits");
        });
        let own: ThreadId = thread::current().id();
        assert_eq!(told.try_recv(), Ok(own));
        assert!(told.try_recv().is_err(), "it waits for the answer");
        answer.send(()).expect("it waits");
        assert!(told.recv_timeout(TIMEOUT).is_ok_and(|other| other != own));
    }

    #[test]
    fn a_woken_future_goes_on_in_the_calling_thread() {
        let runtime = runtime();
        let (tell, told) = mpsc::channel();
        let (wake, waited) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (waiting, begun) = (Arc::clone(&wake), Arc::clone(&waited));
        let task = BegunTask::spawn(runtime.handle(), async move {
            begun.notify_one();
            loop {
                waiting.notified().await;
                tell.send(thread::current().id()).expect("the test waits");
            }
        });
        runtime.block_on(waited.notified());
        // Its thread may be about to leave it.
        drop(task.lock());
        for _ in 0..3 {
            task.wake_here(|| wake.notify_one());
            assert_eq!(told.try_recv(), Ok(thread::current().id()));
        }
        task.stop();
        wake.notify_one();
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err());
    }

    #[test]
    fn no_wake_up_is_lost_between_threads() {
        const WAKERS: usize = 4;
        const TIMES: usize = 2_000;
        let runtime = runtime();
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel::<()>();
        let (tell, told) = mpsc::channel();
        let task = BegunTask::spawn(runtime.handle(), async move {
            let mut receiver = receiver;
            for _ in 0..WAKERS * TIMES {
                receiver.recv().await.expect("more come");
            }
            tell.send(()).expect("the test waits");
        });
        thread::scope(|scope| {
            for waker in 0..WAKERS {
                let (task, sender) = (&task, sender.clone());
                scope.spawn(move || {
                    for _ in 0..TIMES {
                        let send = || sender.send(()).expect("it receives");
                        match waker % 2 {
                            0 => task.wake_here(send),
                            _ => send(),
                        }
                    }
                });
            }
        });
        assert_eq!(told.recv_timeout(TIMEOUT), Ok(()));
    }
}
