//! Memory that a server uses for requests at once: a bound for each connection, and one for all
//! connections of a process. Without space a caller is rejected and retries; over QUIC requests
//! first wait a moment in the window of their connection.

use std::sync::{Arc, OnceLock};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The error message for a caller without space.
pub(super) const TOO_MANY_CALLS: &str = "too many calls are in progress";

/// Least memory that one call is charged on its connection, in KiB.
pub(super) const CALL_WEIGHT_KIB_MIN: usize = 128;

/// Calls and request bodies that a server takes at once on one connection, in KiB.
pub(super) const CONNECTION_BUDGET_KIB: usize = 64 << 10;

/// Default of the bound over all connections of a process.
const PROCESS_BUDGET_KIB_DEFAULT: usize = 512 << 10;

/// With less than this some largest requests would never be taken.
const PROCESS_BUDGET_KIB_MIN: usize = 16 << 10;

/// An eighth of the memory is reserved for requests of at most so many bytes: large, slow requests
/// never block them.
const SMALL_REQUEST_BYTES_MAX: usize = 64 << 10;
const SMALL_REQUEST_DIVISOR: usize = 8;

static PROCESS_BUDGET: OnceLock<ProcessBudget> = OnceLock::new();

/// The room for all requests of a process.
#[derive(Debug, Clone)]
pub(super) struct ProcessBudget {
    /// For all requests.
    shared: Arc<Semaphore>,
    /// For small ones.
    small_requests: Arc<Semaphore>,
}

impl ProcessBudget {
    /// Space for so many KiB in all.
    pub(super) fn new(kib: usize) -> Self {
        let kept = kib / SMALL_REQUEST_DIVISOR;
        Self {
            shared: Arc::new(Semaphore::new(kib - kept)),
            small_requests: Arc::new(Semaphore::new(kept)),
        }
    }

    fn try_reserve(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let take =
            |budget: &Arc<Semaphore>| budget.clone().try_acquire_many_owned(to_kib(bytes)).ok();
        let is_small = bytes <= SMALL_REQUEST_BYTES_MAX;
        take(&self.shared).or_else(|| is_small.then(|| take(&self.small_requests)).flatten())
    }

    async fn reserve(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let take = |budget: &Arc<Semaphore>| budget.clone().acquire_many_owned(to_kib(bytes));
        if bytes > SMALL_REQUEST_BYTES_MAX {
            return take(&self.shared).await.ok();
        }
        let permit = tokio::select! {
            biased;
            permit = take(&self.shared) => permit,
            permit = take(&self.small_requests) => permit,
        };
        permit.ok()
    }
}

/// Bounds the memory for requests in this process, in bytes, for the rest of its life. Only the
/// first call counts; without one the default holds. A few megabytes are the least with which
/// anything works.
pub fn set_request_memory_max(bytes_max: u64) {
    let kib = usize::try_from(bytes_max / 1024).unwrap_or(usize::MAX);
    let kib = kib.clamp(PROCESS_BUDGET_KIB_MIN, Semaphore::MAX_PERMITS);
    let _ = PROCESS_BUDGET.set(ProcessBudget::new(kib));
}

/// The room for all requests of this process.
fn process_budget() -> &'static ProcessBudget {
    PROCESS_BUDGET.get_or_init(|| ProcessBudget::new(PROCESS_BUDGET_KIB_DEFAULT))
}

/// The room for the requests of one connection.
#[derive(Debug, Clone)]
pub(super) struct ConnectionBudget {
    connection: Arc<Semaphore>,
    process: ProcessBudget,
}

/// The place of a request, until it is dropped.
#[derive(Debug)]
pub(super) struct BudgetPermit(#[expect(dead_code, reason = "held")] [OwnedSemaphorePermit; 2]);

impl ConnectionBudget {
    /// The room of a new connection.
    pub(super) fn new() -> Self {
        Self {
            connection: Arc::new(Semaphore::new(CONNECTION_BUDGET_KIB)),
            process: process_budget().clone(),
        }
    }

    /// Space for so many KiB on the connection and on all of them.
    #[cfg(test)]
    pub(super) fn with_budgets(connection_kib: usize, all: &ProcessBudget) -> Self {
        Self {
            connection: Arc::new(Semaphore::new(connection_kib)),
            process: all.clone(),
        }
    }

    /// A permit for a request of so many bytes, if there is space.
    pub(super) fn try_reserve(&self, bytes: usize) -> Option<BudgetPermit> {
        let on_connection = self
            .connection
            .clone()
            .try_acquire_many_owned(call_weight_kib(bytes));
        Some(BudgetPermit([
            on_connection.ok()?,
            self.process.try_reserve(bytes)?,
        ]))
    }

    /// A permit for a request of so many bytes, as soon as there is space.
    pub(super) async fn reserve(&self, bytes: usize) -> Option<BudgetPermit> {
        let on_connection = self.connection.clone().acquire_many_owned(to_kib(bytes));
        Some(BudgetPermit([
            on_connection.await.ok()?,
            self.process.reserve(bytes).await?,
        ]))
    }
}

/// The weight of a call with so many bytes on its connection, in KiB.
pub(super) fn call_weight_kib(bytes: usize) -> u32 {
    to_kib(bytes).max(CALL_WEIGHT_KIB_MIN as u32)
}

fn to_kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn connections_share_one_memory_budget() {
        let all = ProcessBudget::new(10 << 10);
        let budgets = [(); 8].map(|()| ConnectionBudget::with_budgets(CONNECTION_BUDGET_KIB, &all));
        let permits = budgets.each_ref().map(|budget| budget.try_reserve(4 << 20));
        assert_eq!(permits.iter().flatten().count(), 2, "4 MiB twice in 10 MiB");
        let rest = budgets[6].try_reserve(768 << 10);
        assert!(
            rest.is_some(),
            "nothing is left but what is kept for small ones"
        );
        assert!(
            budgets[7]
                .try_reserve(SMALL_REQUEST_BYTES_MAX + 1)
                .is_none()
        );
        let small: Vec<_> = budgets.iter().cycle().take(30).collect();
        let small: Vec<_> = small
            .iter()
            .map(|budget| budget.try_reserve(SMALL_REQUEST_BYTES_MAX))
            .collect();
        assert_eq!(small.iter().flatten().count(), 20, "64 KiB in 1.25 MiB");
        drop((permits, rest, small));
        assert!(budgets[7].try_reserve(4 << 20).is_some());
    }

    fn is_pending(permit: Pin<&mut impl Future<Output = Option<BudgetPermit>>>) -> bool {
        permit
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    }

    #[tokio::test]
    async fn waiting_requests_do_not_block_small_ones() {
        let all = ProcessBudget::new(10 << 10);
        let budgets = [(); 4].map(|()| ConnectionBudget::with_budgets(CONNECTION_BUDGET_KIB, &all));
        let mut permits = Vec::new();
        for budget in &budgets[..2] {
            permits.push(budget.reserve(4 << 20).await.expect("open"));
        }
        let mut third = std::pin::pin!(budgets[2].reserve(4 << 20));
        assert!(is_pending(third.as_mut()));
        assert!(budgets[3].reserve(64 << 10).await.is_some());
        permits.pop();
        assert!(third.await.is_some());
    }

    #[tokio::test]
    async fn a_connection_is_limited_to_its_share() {
        let all = ProcessBudget::new(10 << 10);
        let budget = ConnectionBudget::with_budgets(1 << 10, &all);
        let permit = budget.reserve(1 << 20).await;
        assert!(is_pending(std::pin::pin!(budget.reserve(1))));
        drop(permit);
        assert!(budget.reserve(1).await.is_some());
    }
}
