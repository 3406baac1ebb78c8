//! The policies that a user names for a run. Which there are knows `policy/registry.rs`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The policies that a user named, by family; the default of all other families. Kept in the
/// journal with the other settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PolicyNames(BTreeMap<String, String>);

impl PolicyNames {
    /// The name of a family's policy, if the user gave one.
    #[must_use]
    pub fn get(&self, family: &str) -> Option<&str> {
        self.0.get(family).map(String::as_str)
    }

    /// What a user named, as `family=name`.
    pub fn iter(&self) -> impl Iterator<Item = String> {
        self.0
            .iter()
            .map(|(family, name)| format!("{family}={name}"))
    }

    /// Takes a policy that exists.
    pub(crate) fn set(&mut self, family: &str, name: &str) {
        self.0.insert(family.to_owned(), name.to_owned());
    }
}

/// The policies of a run: for each family the position in its list, the families in the order of
/// `bafs policies`. Names are looked up once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PolicyPositions(pub(crate) [u8; 7]);
