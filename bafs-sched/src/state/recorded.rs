//! What of the state is written to the journal, by fields and rows: a redo log (Mohan et al.,
//! ARIES, ACM TODS 17, 1992). [`kept`] lists for each part of the state which fields are kept.
//! Knows no collection; these are in `state/tracked.rs`.

use std::fmt::Debug;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What was written of a part of the state, or all of it.
pub(crate) trait ChangeSet: Default {
    /// Whether nothing was.
    fn is_nothing(&self) -> bool;
}

/// A collection that notes which rows are written.
pub(crate) trait Recorded {
    type Changes: ChangeSet;

    /// Notes what is written from now on, and nothing before.
    fn start_recording(&mut self);

    /// The rows that were written since they were last taken.
    fn take_changes(&mut self) -> Self::Changes;

    /// All rows that may differ from those of a new state.
    fn all_rows(&self) -> Self::Changes;
}

/// A collection whose rows are put back one by one.
pub(crate) trait Restore: Recorded {
    fn restore(&mut self, changes: Self::Changes);
}

/// A part of the state of which some fields are kept and others rebuilt; see [`kept`].
pub(crate) trait Kept {
    type Changes: ChangeSet;

    fn start_recording(&mut self);

    /// What was written since the last call. `last` has the single values as they were then.
    fn take_changes(&mut self, last: &mut Self::Changes) -> Self::Changes;

    /// All that may differ from a new state.
    fn all_rows(&self) -> Self::Changes;

    /// Puts back values and tables, and takes them out of `changes`. What is left there is put
    /// back by who knows the indexes over it.
    fn restore_plain(&mut self, changes: &mut Self::Changes);

    /// Names the fields that differ from those of another, each after `path`, and how.
    fn note_differences(&self, other: &Self, path: &str, found: &mut Vec<String>);
}

/// Names a field if it differs, with the first lines that do.
pub(crate) fn note_difference<T: PartialEq + Debug>(
    name: &str,
    (one, other): (&T, &T),
    found: &mut Vec<String>,
) {
    if one == other {
        return;
    }
    let (one, other) = (format!("{one:#?}"), format!("{other:#?}"));
    let lines = one.lines().zip(other.lines());
    let same = lines.take_while(|(one, other)| one == other).count();
    let around = |text: &str| {
        let lines = text.lines().skip(same.saturating_sub(6)).take(12);
        lines.map(str::trim).collect::<Vec<_>>().join(" ")
    };
    let (one, other) = (around(&one), around(&other));
    found.push(format!("{name}: {one}\n    restored: {other}"));
}

/// A single value, if it changed. One that is optional itself is not confused with that.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NewValue<T>(pub(crate) Option<T>);

impl<T> Default for NewValue<T> {
    fn default() -> Self {
        Self(None)
    }
}

impl<T> ChangeSet for NewValue<T> {
    fn is_nothing(&self) -> bool {
        self.0.is_none()
    }
}

impl<T: Clone + PartialEq> NewValue<T> {
    /// The value if it is not as it was, which `last` has; it has the new one then.
    pub(crate) fn since(last: &mut Self, now: &T) -> Self {
        if last.0.as_ref() == Some(now) {
            return Self(None);
        }
        *last = Self(Some(now.clone()));
        last.clone()
    }
}

impl<T: Serialize> Serialize for NewValue<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // What is nothing is skipped by whoever holds it.
        match &self.0 {
            Some(value) => value.serialize(serializer),
            None => serializer.serialize_unit(),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for NewValue<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(deserializer).map(|value| Self(Some(value)))
    }
}

/// Rows that were written and rows that are gone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(bound(
    serialize = "K: Serialize, V: Serialize",
    deserialize = "K: Deserialize<'de>, V: Deserialize<'de>"
))]
pub(crate) struct RowChanges<K, V> {
    /// Whether there are no rows but these.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_all: bool,
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    pub(crate) set: Vec<(K, V)>,
    #[serde(default = "Vec::new", skip_serializing_if = "Vec::is_empty")]
    pub(crate) gone: Vec<K>,
}

impl<K, V> Default for RowChanges<K, V> {
    fn default() -> Self {
        Self {
            is_all: false,
            set: Vec::new(),
            gone: Vec::new(),
        }
    }
}

impl<K, V> ChangeSet for RowChanges<K, V> {
    fn is_nothing(&self) -> bool {
        !self.is_all && self.set.is_empty() && self.gone.is_empty()
    }
}

/// A row of which something is kept.
pub(crate) trait Row {
    /// What of it is kept.
    type Kept: Clone + Debug + PartialEq + Serialize + DeserializeOwned;

    fn kept(&self) -> Self::Kept;
}

/// Rows that are kept as they are.
macro_rules! whole_rows {
    ($($row:ty),* $(,)?) => {
        $(impl crate::state::recorded::Row for $row {
            type Kept = Self;

            fn kept(&self) -> Self {
                self.clone()
            }
        })*
    };
}
pub(crate) use whole_rows;

whole_rows!(bool, u32, String, bafs_proto::time::Time);

/// Lists for a part of the state which of its fields are kept and which are rebuilt. Each field is
/// in exactly one list: one that is in none does not compile.
///
/// * `values`: kept as a whole when they are not as before, so they are small;
/// * `tables`: kept and put back row by row;
/// * `indexed`: kept row by row, put back by hand, because others are rebuilt from them;
/// * `parts`: have lists of their own;
/// * `rebuilt`: not kept.
///
/// A field that got another name says under which one journals have it: `#[serde(rename = "…")]`.
macro_rules! kept {
    (
        $(#[$doc:meta])*
        $changes:ident of $state:ty;
        values { $($(#[$value_name:meta])* $value:ident: $value_type:ty),* $(,)? }
        tables { $($(#[$table_name:meta])* $table:ident: $table_type:ty),* $(,)? }
        indexed { $($(#[$indexed_name:meta])* $indexed:ident: $indexed_type:ty),* $(,)? }
        parts { $($(#[$part_name:meta])* $part:ident: $part_type:ty),* $(,)? }
        rebuilt { $($rebuilt:ident),* $(,)? }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        pub(crate) struct $changes {
            $(
                $(#[$value_name])*
                #[serde(skip_serializing_if = "crate::state::recorded::ChangeSet::is_nothing")]
                pub(crate) $value: crate::state::recorded::NewValue<$value_type>,
            )*
            $(
                $(#[$table_name])*
                #[serde(skip_serializing_if = "crate::state::recorded::ChangeSet::is_nothing")]
                pub(crate) $table: <$table_type as crate::state::recorded::Recorded>::Changes,
            )*
            $(
                $(#[$indexed_name])*
                #[serde(skip_serializing_if = "crate::state::recorded::ChangeSet::is_nothing")]
                pub(crate) $indexed: <$indexed_type as crate::state::recorded::Recorded>::Changes,
            )*
            $(
                $(#[$part_name])*
                #[serde(skip_serializing_if = "crate::state::recorded::ChangeSet::is_nothing")]
                pub(crate) $part: <$part_type as crate::state::recorded::Kept>::Changes,
            )*
        }

        impl crate::state::recorded::ChangeSet for $changes {
            fn is_nothing(&self) -> bool {
                true
                $(&& crate::state::recorded::ChangeSet::is_nothing(&self.$value))*
                $(&& crate::state::recorded::ChangeSet::is_nothing(&self.$table))*
                $(&& crate::state::recorded::ChangeSet::is_nothing(&self.$indexed))*
                $(&& crate::state::recorded::ChangeSet::is_nothing(&self.$part))*
            }
        }

        impl crate::state::recorded::Kept for $state {
            type Changes = $changes;

            fn start_recording(&mut self) {
                // Each field is in one of the lists.
                let Self {
                    $($value: _,)* $($table: _,)* $($indexed: _,)* $($part: _,)* $($rebuilt: _,)*
                } = self;
                $(crate::state::recorded::Recorded::start_recording(&mut self.$table);)*
                $(crate::state::recorded::Recorded::start_recording(&mut self.$indexed);)*
                $(crate::state::recorded::Kept::start_recording(&mut self.$part);)*
            }

            #[allow(unused_variables, reason = "not every part has values")]
            fn take_changes(&mut self, last: &mut $changes) -> $changes {
                $changes {
                    $($value: crate::state::recorded::NewValue::since(
                        &mut last.$value,
                        &self.$value,
                    ),)*
                    $($table: crate::state::recorded::Recorded::take_changes(&mut self.$table),)*
                    $($indexed: crate::state::recorded::Recorded::take_changes(
                        &mut self.$indexed,
                    ),)*
                    $($part: crate::state::recorded::Kept::take_changes(
                        &mut self.$part,
                        &mut last.$part,
                    ),)*
                }
            }

            fn all_rows(&self) -> $changes {
                $changes {
                    $($value: crate::state::recorded::NewValue(Some(self.$value.clone())),)*
                    $($table: crate::state::recorded::Recorded::all_rows(&self.$table),)*
                    $($indexed: crate::state::recorded::Recorded::all_rows(&self.$indexed),)*
                    $($part: crate::state::recorded::Kept::all_rows(&self.$part),)*
                }
            }

            #[allow(unused_variables, reason = "not every part has fields")]
            fn note_differences(&self, other: &Self, path: &str, found: &mut Vec<String>) {
                $(crate::state::recorded::note_difference(
                    &format!("{path}{}", stringify!($value)),
                    (&self.$value, &other.$value),
                    found,
                );)*
                $(crate::state::recorded::note_difference(
                    &format!("{path}{}", stringify!($table)),
                    (&self.$table, &other.$table),
                    found,
                );)*
                $(crate::state::recorded::note_difference(
                    &format!("{path}{}", stringify!($indexed)),
                    (&self.$indexed, &other.$indexed),
                    found,
                );)*
                $(crate::state::recorded::note_difference(
                    &format!("{path}{}", stringify!($rebuilt)),
                    (&self.$rebuilt, &other.$rebuilt),
                    found,
                );)*
                $(crate::state::recorded::Kept::note_differences(
                    &self.$part,
                    &other.$part,
                    &format!("{path}{}.", stringify!($part)),
                    found,
                );)*
            }

            #[allow(unused_variables, reason = "not every part has rows")]
            fn restore_plain(&mut self, changes: &mut $changes) {
                $(if let Some(value) = changes.$value.0.take() {
                    self.$value = value;
                })*
                $(crate::state::recorded::Restore::restore(
                    &mut self.$table,
                    std::mem::take(&mut changes.$table),
                );)*
                $(crate::state::recorded::Kept::restore_plain(
                    &mut self.$part,
                    &mut changes.$part,
                );)*
            }
        }
    };
}
pub(crate) use kept;

/// What was written of a part that there may be or not.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PartChanges<C: Default> {
    #[serde(skip_serializing_if = "ChangeSet::is_nothing")]
    pub(crate) exists: NewValue<bool>,
    /// Whether it replaces the one before.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_fresh: bool,
    pub(crate) part: C,
}

impl<C: Default> Default for PartChanges<C> {
    fn default() -> Self {
        Self {
            exists: NewValue(None),
            is_fresh: false,
            part: C::default(),
        }
    }
}

impl<C: ChangeSet> ChangeSet for PartChanges<C> {
    fn is_nothing(&self) -> bool {
        self.exists.is_nothing() && !self.is_fresh && self.part.is_nothing()
    }
}

/// Whether no journal has a part yet: nothing by which two parts differ.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Freshness(pub(crate) bool);

impl PartialEq for Freshness {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// A part that says whether it is another than before.
pub(crate) trait MayReplace {
    /// Whether it is new since the last call.
    fn take_fresh(&mut self) -> bool;
}

impl<T: Kept + MayReplace> Kept for Option<T> {
    type Changes = PartChanges<T::Changes>;

    fn start_recording(&mut self) {
        if let Some(part) = self {
            part.start_recording();
        }
    }

    fn take_changes(&mut self, last: &mut Self::Changes) -> Self::Changes {
        let exists = NewValue::since(&mut last.exists, &self.is_some());
        let Some(part) = self else {
            let part = T::Changes::default();
            return PartChanges {
                exists,
                is_fresh: false,
                part,
            };
        };
        let is_fresh = part.take_fresh();
        if is_fresh {
            last.part = T::Changes::default();
        }
        PartChanges {
            exists,
            is_fresh,
            part: part.take_changes(&mut last.part),
        }
    }

    fn all_rows(&self) -> Self::Changes {
        PartChanges {
            exists: NewValue(Some(self.is_some())),
            is_fresh: self.is_some(),
            part: self.as_ref().map(T::all_rows).unwrap_or_default(),
        }
    }

    fn note_differences(&self, other: &Self, path: &str, found: &mut Vec<String>) {
        match (self, other) {
            (Some(one), Some(other)) => one.note_differences(other, path, found),
            (one, other) => {
                let exist = (&one.is_some(), &other.is_some());
                note_difference(path, exist, found);
            }
        }
    }

    /// Of a part that exists. Who can make one has made it before.
    fn restore_plain(&mut self, changes: &mut Self::Changes) {
        match self {
            Some(part) if changes.exists.0 != Some(false) => {
                part.restore_plain(&mut changes.part);
                changes.exists = NewValue(None);
                changes.is_fresh = false;
            }
            part => {
                *part = None;
                *changes = PartChanges::default();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_value_that_became_nothing_is_told() {
        let mut last = NewValue(Some(Some(3)));
        assert_eq!(NewValue::since(&mut last, &None), NewValue(Some(None)));
        assert!(NewValue::since(&mut last, &None).is_nothing());
    }
}
