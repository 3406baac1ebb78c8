//! Checks the capability of every request; remembers what it checked for a short while.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use bafs_proto::Result;
use bafs_proto::time::Time;
use bafs_proto::token::{Resource, Right, Token, Verifier};

use crate::clock;

/// A verified answer is believed for so long; bounds how late an expiry takes effect.
const MEMORY_MS: u64 = 5_000;

/// Most answers remembered: a signature check costs about 100 µs, a look-up under 1 µs.
const MEMORY_ENTRIES_MAX: usize = 4096;

/// Checks capabilities against the cluster's public key.
#[derive(Debug)]
pub struct Access {
    verifier: Verifier,
    /// Where others reach the server, for tokens that are good at one server only.
    address: Option<String>,
    memory: Mutex<BTreeMap<(Token, Resource, Right), Time>>,
}

impl Access {
    /// A checker that believes tokens of this verifier's authority.
    pub fn new(verifier: Verifier) -> Self {
        Self {
            verifier,
            address: None,
            memory: Mutex::default(),
        }
    }

    /// As [`Self::new`], of a server that others reach at `address`: it also believes tokens that
    /// are for it alone.
    pub fn at(verifier: Verifier, address: String) -> Self {
        Self {
            address: Some(address),
            ..Self::new(verifier)
        }
    }

    /// Demands that `token` grants `right` on `resource` now.
    ///
    /// # Errors
    /// `TokenInvalid`, `TokenExpired`, `RightMissing`.
    pub fn require(&self, token: &Token, resource: Resource, right: Right) -> Result<()> {
        let now = clock::now();
        let key = (token.clone(), resource, right);
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if memory
            .get(&key)
            .is_some_and(|checked| now.ms_since(*checked) < MEMORY_MS)
        {
            return Ok(());
        }
        memory.remove(&key);
        drop(memory);
        let address = self.address.as_deref();
        self.verifier
            .verify_at(token, address, &key.1, right, now)?;
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.len() >= MEMORY_ENTRIES_MAX {
            memory.clear();
        }
        memory.insert(key, now);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::token::Signer;

    #[test]
    fn a_remembered_answer_is_for_that_question_only() {
        let signer = Signer::generate();
        let access = Access::new(signer.verifier());
        let expires = clock::now().plus_ms(60_000);
        let token = signer
            .grant(&[Resource::Jobs], &[Right::Read], expires)
            .expect("grant");
        for _ in 0..2 {
            assert!(access.require(&token, Resource::Jobs, Right::Read).is_ok());
            assert!(
                access
                    .require(&token, Resource::Jobs, Right::Manage)
                    .is_err()
            );
            assert!(
                access
                    .require(&token, Resource::Catalog, Right::Read)
                    .is_err()
            );
        }
    }
}
