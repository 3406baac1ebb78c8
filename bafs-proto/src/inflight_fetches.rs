//! Single flight: a key that is being fetched is not fetched again. Later readers wait for the
//! running fetch. The agent and the storage server both use it. It fetches nothing itself.
//!
//! ```text
//!  reader ─▶ join_or_start(key) ─┬─▶ Join::Owner    fetches, then completes or abandons
//!                                ├─▶ Join::Waiter   waits for the owner's result
//!                                └─▶ Join::Present  the value arrived before the call
//! ```
//!
//! An owner first stores the value, then ends the fetch. So `is_present` and the table of running
//! fetches together never miss a value: exactly one of the three results holds.
//!
//! A fetch ends when its owner is dropped. Without a result it is abandoned: the waiters get
//! nothing, and the next reader starts a new fetch. A failed fetch takes no new waiters, because
//! its cause may have passed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use crate::error::Result;

/// Running fetches of values `V` by keys `K`, each with the state `S` of its user.
#[derive(Debug)]
pub struct InflightFetches<K, V, S = ()>(Arc<Mutex<BTreeMap<K, InflightFetch<V, S>>>>);

/// One running fetch.
#[derive(Debug)]
pub struct InflightFetch<V, S> {
    result: watch::Receiver<Option<Result<V>>>,
    /// What the user of the table notes about this fetch.
    pub state: S,
}

/// How a reader gets a value.
#[derive(Debug)]
pub enum Join<K: Ord, V, S = ()> {
    /// The reader must fetch it.
    Owner(FetchOwner<K, V, S>),
    /// Another reader is fetching it.
    Waiter(FetchWaiter<V>),
    /// It arrived before the call.
    Present,
}

/// Runs a fetch. The fetch ends when this is dropped.
#[derive(Debug)]
pub struct FetchOwner<K: Ord, V, S = ()> {
    fetches: InflightFetches<K, V, S>,
    key: K,
    result: watch::Sender<Option<Result<V>>>,
}

/// Waits for a fetch.
#[derive(Debug, Clone)]
pub struct FetchWaiter<V>(watch::Receiver<Option<Result<V>>>);

impl<K, V, S> Default for InflightFetches<K, V, S> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K, V, S> Clone for InflightFetches<K, V, S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K: Ord + Clone, V, S> InflightFetches<K, V, S> {
    /// Joins the fetch of a key, or starts one, unless `is_present` says that the value arrived.
    /// `on_join` sees the fetch that is joined, `new_state` makes the state of a new one. No other
    /// call runs meanwhile.
    pub fn join_or_start(
        &self,
        key: K,
        is_present: impl FnOnce() -> bool,
        on_join: impl FnOnce(&mut InflightFetch<V, S>),
        new_state: impl FnOnce() -> S,
    ) -> Join<K, V, S> {
        let mut running = self.lock();
        if let Some(fetch) = running.get_mut(&key).filter(|fetch| !fetch.has_failed()) {
            on_join(fetch);
            return Join::Waiter(FetchWaiter(fetch.result.clone()));
        }
        if is_present() {
            return Join::Present;
        }
        let (sender, result) = watch::channel(None);
        let state = new_state();
        running.insert(key.clone(), InflightFetch { result, state });
        Join::Owner(FetchOwner {
            fetches: self.clone(),
            key,
            result: sender,
        })
    }

    /// Joins the running fetch of a key, if `accept` agrees.
    pub fn join_if(
        &self,
        key: &K,
        accept: impl FnOnce(&mut InflightFetch<V, S>) -> bool,
    ) -> Option<FetchWaiter<V>> {
        let mut running = self.lock();
        let fetch = running.get_mut(key).filter(|fetch| !fetch.has_failed())?;
        accept(fetch).then(|| FetchWaiter(fetch.result.clone()))
    }

    /// Shows the running fetch of a key to `change`, if there is one.
    pub fn update<T>(
        &self,
        key: &K,
        change: impl FnOnce(&mut InflightFetch<V, S>) -> T,
    ) -> Option<T> {
        self.lock().get_mut(key).map(change)
    }

    /// Whether a key is being fetched.
    pub fn is_running(&self, key: &K) -> bool {
        self.lock().contains_key(key)
    }
}

impl<K, V, S> InflightFetches<K, V, S> {
    /// Whether a fetch has its result and has not ended: its owner is storing that.
    pub fn has_completed(&self) -> bool {
        self.lock().values().any(InflightFetch::has_completed)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<K, InflightFetch<V, S>>> {
        // No holder leaves the table half-changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<V, S> InflightFetch<V, S> {
    /// Whether the value has arrived.
    pub fn has_completed(&self) -> bool {
        matches!(*self.result.borrow(), Some(Ok(_)))
    }

    fn has_failed(&self) -> bool {
        matches!(*self.result.borrow(), Some(Err(_)))
    }
}

impl<K: Ord, V, S> FetchOwner<K, V, S> {
    /// The key that is being fetched.
    pub fn key(&self) -> &K {
        &self.key
    }

    /// A waiter for the own fetch.
    pub fn waiter(&self) -> FetchWaiter<V> {
        FetchWaiter(self.result.subscribe())
    }

    /// Gives the value, or the reason why there is none, to all waiters. Readers may join the
    /// fetch until the owner is dropped.
    pub fn complete(&self, result: Result<V>) {
        self.result.send_replace(Some(result));
    }
}

impl<K: Ord, V, S> Drop for FetchOwner<K, V, S> {
    fn drop(&mut self) {
        let mut running = self.fetches.lock();
        // After a failure the fetch of the next reader may run already.
        let own = self.result.subscribe();
        let fetch = running.get(&self.key);
        if fetch.is_some_and(|fetch| fetch.result.same_channel(&own)) {
            running.remove(&self.key);
        }
    }
}

impl<V: Clone> FetchWaiter<V> {
    /// The result of the fetch; `None` when its owner abandoned it.
    pub async fn wait(&mut self) -> Option<Result<V>> {
        let result = self.0.wait_for(Option::is_some).await;
        result.ok().and_then(|result| result.clone())
    }

    /// Returns when the fetch has ended: its owner has stored the value, if it ever will.
    pub async fn wait_until_ended(&mut self) {
        while self.0.changed().await.is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Error, ErrorCode};

    type Fetches = InflightFetches<u64, u8>;

    fn join(fetches: &Fetches, key: u64, is_present: bool) -> Join<u64, u8> {
        fetches.join_or_start(key, || is_present, |_| {}, || ())
    }

    fn start(fetches: &Fetches, key: u64) -> FetchOwner<u64, u8> {
        match join(fetches, key, false) {
            Join::Owner(owner) => owner,
            _ => panic!("the key is not being fetched yet"),
        }
    }

    #[tokio::test]
    async fn one_fetch_serves_all_readers() {
        let fetches = Fetches::default();
        let owner = start(&fetches, 1);
        let Join::Waiter(second) = join(&fetches, 1, false) else {
            panic!("the key is being fetched")
        };
        let readers = [owner.waiter(), second];
        owner.complete(Ok(7));
        assert!(matches!(join(&fetches, 1, true), Join::Waiter(_)));
        drop(owner);
        for mut reader in readers {
            assert_eq!(reader.wait().await, Some(Ok(7)));
            reader.wait_until_ended().await;
        }
        assert!(matches!(join(&fetches, 1, true), Join::Present));
        assert!(!fetches.is_running(&1));
    }

    #[tokio::test]
    async fn an_abandoned_fetch_releases_its_waiters() {
        let fetches = Fetches::default();
        let owner = start(&fetches, 1);
        let mut waiter = owner.waiter();
        drop(owner);
        assert_eq!(waiter.wait().await, None);
        start(&fetches, 1);
    }

    #[test]
    fn a_failed_fetch_takes_no_new_readers() {
        let fetches = Fetches::default();
        let failed = start(&fetches, 1);
        failed.complete(Err(Error::new(ErrorCode::SourceChanged, "")));
        assert!(fetches.join_if(&1, |_| true).is_none());
        let next = start(&fetches, 1);
        drop(failed);
        assert!(fetches.is_running(&1), "the next fetch goes on");
        drop(next);
        assert!(!fetches.is_running(&1));
    }

    #[test]
    fn a_fetch_shows_its_state_to_joiners() {
        let fetches = InflightFetches::<u64, u8, u32>::default();
        let first = fetches.join_or_start(1, || false, |_| {}, || 5);
        let add = |fetch: &mut InflightFetch<u8, u32>| fetch.state += 1;
        let joined = fetches.join_or_start(1, || false, add, || 9);
        assert!(matches!(
            (&first, &joined),
            (Join::Owner(_), Join::Waiter(_))
        ));
        let refused = fetches.join_if(&1, |fetch| fetch.state > 6);
        assert!(refused.is_none());
        assert_eq!(fetches.update(&1, |fetch| fetch.state), Some(6));
        assert_eq!(fetches.update(&2, |fetch| fetch.state), None);
    }
}
