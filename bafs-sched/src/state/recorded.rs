//! What of the state is written to the journal, by fields and rows: a redo log (Mohan et al.,
//! ARIES, ACM TODS 17, 1992). [`kept`] lists for each part of the state which fields are kept.
//! Knows no collection; these are in `state/tracked.rs`.

use std::borrow::Cow;
use std::fmt::Debug;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};

use crate::state::row_encoding::FieldWriter;

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

    /// Writes the rows that were written since the last call, under this name.
    fn write_changes(&mut self, name: &str, to: &mut FieldWriter<'_>);

    /// Writes all rows that may differ from those of a new state.
    fn write_all(&self, name: &str, to: &mut FieldWriter<'_>);
}

/// A collection whose rows are put back one by one.
pub(crate) trait Restore: Recorded {
    fn restore(&mut self, changes: Self::Changes);
}

/// A part of the state of which some fields are kept and others rebuilt; see [`kept`].
pub(crate) trait Kept {
    type Changes: ChangeSet;

    fn start_recording(&mut self);

    /// Writes what was written since the last call. `last` has the single values as they were then.
    fn write_changes(&mut self, last: &mut Self::Changes, to: &mut FieldWriter<'_>);

    /// Writes all that may differ from a new state.
    fn write_all(&self, to: &mut FieldWriter<'_>);

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

impl<T: Clone + PartialEq + Serialize> NewValue<T> {
    /// Writes a value if it is not as it was, which `self` has; it has the new one then.
    pub(crate) fn write_since(&mut self, now: &T, name: &str, to: &mut FieldWriter<'_>) {
        if self.0.as_ref() != Some(now) {
            to.write_field(name, now);
            self.0 = Some(now.clone());
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for NewValue<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        T::deserialize(deserializer).map(|value| Self(Some(value)))
    }
}

/// Rows that were written and rows that are gone.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(bound(deserialize = "K: Deserialize<'de>, V: Deserialize<'de>"))]
pub(crate) struct RowChanges<K, V> {
    /// Whether there are no rows but these.
    #[serde(default)]
    pub(crate) is_all: bool,
    #[serde(default = "Vec::new")]
    pub(crate) set: Vec<(K, V)>,
    #[serde(default = "Vec::new")]
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

/// Whether a field of a row need not be written, as it has a default: there are millions of rows.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A row of which something is kept.
pub(crate) trait Row {
    /// What of it is kept.
    type Kept: Clone + Debug + PartialEq + Serialize + DeserializeOwned;

    fn kept(&self) -> Cow<'_, Self::Kept>;
}

/// Rows that are kept as they are, but for fields that are not serialized.
macro_rules! whole_rows {
    ($($row:ty),* $(,)?) => {
        $(impl crate::state::recorded::Row for $row {
            type Kept = Self;

            fn kept(&self) -> std::borrow::Cow<'_, Self> {
                std::borrow::Cow::Borrowed(self)
            }
        })*
    };
}
pub(crate) use whole_rows;

whole_rows!(bool, u32, String, bafs_proto::time::Time);

/// The name under which journals have a field.
macro_rules! name_in_journal {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $name:literal) => {
        $name
    };
}
pub(crate) use name_in_journal;

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
        values {
            $($(#[serde(rename = $value_name:literal)])? $value:ident: $value_type:ty),*
            $(,)?
        }
        tables {
            $($(#[serde(rename = $table_name:literal)])? $table:ident: $table_type:ty),*
            $(,)?
        }
        indexed {
            $($(#[serde(rename = $indexed_name:literal)])? $indexed:ident: $indexed_type:ty),*
            $(,)?
        }
        parts { $($(#[serde(rename = $part_name:literal)])? $part:ident: $part_type:ty),* $(,)? }
        rebuilt { $($rebuilt:ident),* $(,)? }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Default, PartialEq, serde::Deserialize)]
        #[serde(default)]
        pub(crate) struct $changes {
            $(
                $(#[serde(rename = $value_name)])?
                pub(crate) $value: crate::state::recorded::NewValue<$value_type>,
            )*
            $(
                $(#[serde(rename = $table_name)])?
                pub(crate) $table: <$table_type as crate::state::recorded::Recorded>::Changes,
            )*
            $(
                $(#[serde(rename = $indexed_name)])?
                pub(crate) $indexed: <$indexed_type as crate::state::recorded::Recorded>::Changes,
            )*
            $(
                $(#[serde(rename = $part_name)])?
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
            fn write_changes(
                &mut self,
                last: &mut $changes,
                to: &mut crate::state::row_encoding::FieldWriter<'_>,
            ) {
                $(last.$value.write_since(
                    &self.$value,
                    crate::state::recorded::name_in_journal!($value $($value_name)?),
                    to,
                );)*
                $(crate::state::recorded::Recorded::write_changes(
                    &mut self.$table,
                    crate::state::recorded::name_in_journal!($table $($table_name)?),
                    to,
                );)*
                $(crate::state::recorded::Recorded::write_changes(
                    &mut self.$indexed,
                    crate::state::recorded::name_in_journal!($indexed $($indexed_name)?),
                    to,
                );)*
                $(to.write_part(
                    crate::state::recorded::name_in_journal!($part $($part_name)?),
                    |to| crate::state::recorded::Kept::write_changes(
                        &mut self.$part,
                        &mut last.$part,
                        to,
                    ),
                );)*
            }

            #[allow(unused_variables, reason = "not every part has fields")]
            fn write_all(&self, to: &mut crate::state::row_encoding::FieldWriter<'_>) {
                $(to.write_field(
                    crate::state::recorded::name_in_journal!($value $($value_name)?),
                    &self.$value,
                );)*
                $(crate::state::recorded::Recorded::write_all(
                    &self.$table,
                    crate::state::recorded::name_in_journal!($table $($table_name)?),
                    to,
                );)*
                $(crate::state::recorded::Recorded::write_all(
                    &self.$indexed,
                    crate::state::recorded::name_in_journal!($indexed $($indexed_name)?),
                    to,
                );)*
                $(to.write_part(
                    crate::state::recorded::name_in_journal!($part $($part_name)?),
                    |to| crate::state::recorded::Kept::write_all(&self.$part, to),
                );)*
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
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct PartChanges<C: Default> {
    pub(crate) exists: NewValue<bool>,
    /// Whether it replaces the one before.
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

    fn write_changes(&mut self, last: &mut Self::Changes, to: &mut FieldWriter<'_>) {
        last.exists.write_since(&self.is_some(), "exists", to);
        let Some(part) = self else {
            return;
        };
        if part.take_fresh() {
            last.part = T::Changes::default();
            to.write_field("is_fresh", &true);
        }
        to.write_part("part", |to| part.write_changes(&mut last.part, to));
    }

    fn write_all(&self, to: &mut FieldWriter<'_>) {
        to.write_field("exists", &self.is_some());
        if let Some(part) = self {
            to.write_field("is_fresh", &true);
            to.write_part("part", |to| part.write_all(to));
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
    use std::collections::BTreeMap;

    use super::*;
    use crate::state::row_encoding::{read_rows, write_map};

    #[test]
    fn optional_value_that_became_nothing_is_told() {
        let mut last = NewValue(Some(Some(3)));
        let mut bytes = Vec::new();
        let mut write =
            |bytes: &mut Vec<u8>| write_map(bytes, |to| last.write_since(&None, "value", to));
        assert!(write(&mut bytes));
        let read: BTreeMap<String, NewValue<Option<i32>>> = read_rows(&bytes).expect("it is read");
        assert_eq!(read["value"], NewValue(Some(None)));
        assert!(!write(&mut bytes), "it is told once");
    }
}
