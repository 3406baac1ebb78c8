//! Collections of the state that say which of their rows were written: the journal keeps those
//! rows (`state/recorded.rs`). They know neither jobs nor files.
//!
//! [`Rows`], [`Table`] and [`Keys`] read as the collections that they hold. Only what writes a row
//! is a method of their own, and notes its key. Nothing is noted before
//! [`Recorded::start_recording`]: a simulator has no journal.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::ops::{Deref, Index, IndexMut};
use std::slice::SliceIndex;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::state::recorded::{Recorded, Restore, Row, RowChanges};
use crate::state::row_encoding::{FieldWriter, ListWriter};

/// Fields of [`RowChanges`].
const IS_ALL: &str = "is_all";
const SET: &str = "set";
const GONE: &str = "gone";

/// Keys of rows that were written.
#[derive(Debug, Clone, Default)]
struct Touched<K> {
    keys: Vec<K>,
    is_recording: bool,
}

impl<K: Ord + Clone> Touched<K> {
    fn note(&mut self, key: &K) {
        if self.is_recording && self.keys.last() != Some(key) {
            self.keys.push(key.clone());
        }
    }

    fn note_all<'k>(&mut self, keys: impl Iterator<Item = &'k K>)
    where
        K: 'k,
    {
        if self.is_recording {
            self.keys.extend(keys.cloned());
        }
    }

    fn start(&mut self) {
        self.keys.clear();
        self.is_recording = true;
    }

    /// Each key once, in order, until they are noted anew.
    fn sort(&mut self) -> &[K] {
        self.keys.sort_unstable();
        self.keys.dedup();
        &self.keys
    }
}

/// Rows by number; none goes.
#[derive(Clone)]
pub(crate) struct Rows<V> {
    rows: Vec<V>,
    touched: Touched<u32>,
    /// One bit for each row that may differ from that of a new state.
    ever: Vec<u64>,
}

impl<V: Debug> Debug for Rows<V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows.fmt(f)
    }
}

impl<V> Default for Rows<V> {
    fn default() -> Self {
        Self::from(Vec::new())
    }
}

impl<V: PartialEq> PartialEq for Rows<V> {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows
    }
}

impl<V> From<Vec<V>> for Rows<V> {
    fn from(rows: Vec<V>) -> Self {
        Self {
            rows,
            touched: Touched::default(),
            ever: Vec::new(),
        }
    }
}

impl<V> Deref for Rows<V> {
    type Target = [V];

    fn deref(&self) -> &[V] {
        &self.rows
    }
}

impl<V, I: SliceIndex<[V]>> Index<I> for Rows<V> {
    type Output = I::Output;

    fn index(&self, at: I) -> &I::Output {
        &self.rows[at]
    }
}

impl<V> IndexMut<usize> for Rows<V> {
    fn index_mut(&mut self, at: usize) -> &mut V {
        self.note(at);
        &mut self.rows[at]
    }
}

impl<'r, V> IntoIterator for &'r Rows<V> {
    type Item = &'r V;
    type IntoIter = std::slice::Iter<'r, V>;

    fn into_iter(self) -> Self::IntoIter {
        self.rows.iter()
    }
}

impl<V> Rows<V> {
    fn note(&mut self, at: usize) {
        if self.touched.is_recording {
            self.touched.note(&number(at));
            self.note_ever(at);
        }
    }

    fn note_ever(&mut self, at: usize) {
        if self.ever.len() <= at / 64 {
            self.ever.resize(at / 64 + 1, 0);
        }
        self.ever[at / 64] |= 1 << (at % 64);
    }

    pub(crate) fn is_recording(&self) -> bool {
        self.touched.is_recording
    }

    /// A row for what is not kept, but rebuilt from other rows.
    pub(crate) fn derived_mut(&mut self, at: usize) -> &mut V {
        &mut self.rows[at]
    }

    pub(crate) fn push(&mut self, row: V) {
        self.rows.push(row);
        self.note(self.rows.len() - 1);
    }

    /// Where the last of these rows is.
    pub(crate) fn last_position(&self, is_it: impl FnMut(&V) -> bool) -> Option<usize> {
        self.rows.iter().rposition(is_it)
    }
}

impl<V: Row> Rows<V> {
    fn write_rows(&self, keys: impl Iterator<Item = u32>, name: &str, to: &mut FieldWriter<'_>) {
        let write = |set: &mut ListWriter<'_>| {
            keys.for_each(|key| set.push(&(key, self.rows[key as usize].kept())));
        };
        to.write_part(name, |to| to.write_list(SET, write));
    }
}

impl<V: Row> Recorded for Rows<V> {
    type Changes = RowChanges<u32, V::Kept>;

    fn start_recording(&mut self) {
        self.touched.start();
    }

    fn write_changes(&mut self, name: &str, to: &mut FieldWriter<'_>) {
        if self.touched.keys.is_empty() {
            return;
        }
        self.touched.sort();
        self.write_rows(self.touched.keys.iter().copied(), name, to);
        self.touched.keys.clear();
    }

    fn write_all(&self, name: &str, to: &mut FieldWriter<'_>) {
        let words = self.ever.iter().enumerate();
        let keys = words.flat_map(|(at, word)| {
            let bits = (0..64).filter(move |bit| word >> bit & 1 == 1);
            bits.map(move |bit| number(at * 64 + bit))
        });
        self.write_rows(keys, name, to);
    }
}

impl<V: Row<Kept = V>> Restore for Rows<V> {
    fn restore(&mut self, changes: Self::Changes) {
        for (key, row) in changes.set {
            let at = key as usize;
            self.note_ever(at);
            match self.rows.get_mut(at) {
                Some(old) => *old = row,
                None => self.rows.push(row),
            }
        }
    }
}

/// Writes the rows of keys that were written, of which `write_row` answers whether they exist, and
/// the keys of those that are gone.
fn write_touched<K: Ord + Clone + Serialize>(
    touched: &mut Touched<K>,
    name: &str,
    to: &mut FieldWriter<'_>,
    mut write_row: impl FnMut(&K, &mut ListWriter<'_>) -> bool,
) {
    if touched.keys.is_empty() {
        return;
    }
    let mut gone = Vec::new();
    let keys = touched.sort();
    to.write_part(name, |to| {
        to.write_list(SET, |set| {
            gone.extend(keys.iter().filter(|key| !write_row(key, set)));
        });
        if !gone.is_empty() {
            to.write_field(GONE, &gone);
        }
    });
    touched.keys.clear();
}

/// Writes rows besides which there are no others.
fn write_whole(name: &str, to: &mut FieldWriter<'_>, write: impl FnOnce(&mut ListWriter<'_>)) {
    to.write_part(name, |to| {
        to.write_field(IS_ALL, &true);
        to.write_list(SET, write);
    });
}

fn number(at: usize) -> u32 {
    u32::try_from(at).expect("rows have 32 bits")
}

/// Rows by key.
#[derive(Clone)]
pub(crate) struct Table<K, V> {
    rows: BTreeMap<K, V>,
    touched: Touched<K>,
}

impl<K: Debug, V: Debug> Debug for Table<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rows.fmt(f)
    }
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Self::from(BTreeMap::new())
    }
}

impl<K: PartialEq, V: PartialEq> PartialEq for Table<K, V> {
    fn eq(&self, other: &Self) -> bool {
        self.rows == other.rows
    }
}

impl<K, V> From<BTreeMap<K, V>> for Table<K, V> {
    fn from(rows: BTreeMap<K, V>) -> Self {
        let touched = Touched {
            keys: Vec::new(),
            is_recording: false,
        };
        Self { rows, touched }
    }
}

impl<K, V> Deref for Table<K, V> {
    type Target = BTreeMap<K, V>;

    fn deref(&self) -> &BTreeMap<K, V> {
        &self.rows
    }
}

impl<K: Ord, V> Index<&K> for Table<K, V> {
    type Output = V;

    fn index(&self, key: &K) -> &V {
        &self.rows[key]
    }
}

impl<'t, K, V> IntoIterator for &'t Table<K, V> {
    type Item = (&'t K, &'t V);
    type IntoIter = std::collections::btree_map::Iter<'t, K, V>;

    fn into_iter(self) -> Self::IntoIter {
        self.rows.iter()
    }
}

impl<K: Ord + Clone, V> Table<K, V> {
    pub(crate) fn insert(&mut self, key: K, row: V) -> Option<V> {
        self.touched.note(&key);
        self.rows.insert(key, row)
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let removed = self.rows.remove(key)?;
        self.touched.note(key);
        Some(removed)
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let row = self.rows.get_mut(key)?;
        self.touched.note(key);
        Some(row)
    }

    /// A row for what is not kept, but rebuilt from other rows.
    pub(crate) fn derived_mut(&mut self, key: &K) -> Option<&mut V> {
        self.rows.get_mut(key)
    }

    /// A row was written that was got for what is not kept.
    pub(crate) fn note(&mut self, key: &K) {
        self.touched.note(key);
    }

    pub(crate) fn entry(&mut self, key: K) -> Entry<'_, K, V> {
        self.touched.note(&key);
        self.rows.entry(key)
    }

    pub(crate) fn extend(&mut self, rows: impl IntoIterator<Item = (K, V)>) {
        for (key, row) in rows {
            self.insert(key, row);
        }
    }

    /// Only rows are taken out; none is changed.
    pub(crate) fn retain(&mut self, mut is_kept: impl FnMut(&K, &V) -> bool) {
        let touched = &mut self.touched;
        self.rows.retain(|key, row| {
            let is_kept = is_kept(key, row);
            if !is_kept {
                touched.note(key);
            }
            is_kept
        });
    }

    pub(crate) fn clear(&mut self) {
        self.touched.note_all(self.rows.keys());
        self.rows.clear();
    }

    /// All rows, each of which counts as written.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&K, &mut V)> {
        self.touched.note_all(self.rows.keys());
        self.rows.iter_mut()
    }

    /// All rows, each of which counts as written.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut V> {
        self.iter_mut().map(|(_, row)| row)
    }
}

impl<K, V> Recorded for Table<K, V>
where
    K: Ord + Clone + Serialize + DeserializeOwned,
    V: Row,
{
    type Changes = RowChanges<K, V::Kept>;

    fn start_recording(&mut self) {
        self.touched.start();
    }

    fn write_changes(&mut self, name: &str, to: &mut FieldWriter<'_>) {
        let rows = &self.rows;
        write_touched(&mut self.touched, name, to, |key, set| {
            let row = rows.get(key);
            row.map(|row| set.push(&(key, row.kept()))).is_some()
        });
    }

    fn write_all(&self, name: &str, to: &mut FieldWriter<'_>) {
        let write = |set: &mut ListWriter<'_>| {
            for (key, row) in &self.rows {
                set.push(&(key, row.kept()));
            }
        };
        write_whole(name, to, write);
    }
}

impl<K, V> Restore for Table<K, V>
where
    K: Ord + Clone + Serialize + DeserializeOwned,
    V: Row<Kept = V>,
{
    fn restore(&mut self, changes: Self::Changes) {
        if changes.is_all {
            self.rows.clear();
        }
        for key in changes.gone {
            self.rows.remove(&key);
        }
        self.rows.extend(changes.set);
    }
}

/// Keys without anything beside them.
#[derive(Clone)]
pub(crate) struct Keys<K> {
    keys: BTreeSet<K>,
    touched: Touched<K>,
}

impl<K: Debug> Debug for Keys<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.keys.fmt(f)
    }
}

impl<K> Default for Keys<K> {
    fn default() -> Self {
        Self::from(BTreeSet::new())
    }
}

impl<K: PartialEq> PartialEq for Keys<K> {
    fn eq(&self, other: &Self) -> bool {
        self.keys == other.keys
    }
}

impl<K> From<BTreeSet<K>> for Keys<K> {
    fn from(keys: BTreeSet<K>) -> Self {
        let touched = Touched {
            keys: Vec::new(),
            is_recording: false,
        };
        Self { keys, touched }
    }
}

impl<K> Deref for Keys<K> {
    type Target = BTreeSet<K>;

    fn deref(&self) -> &BTreeSet<K> {
        &self.keys
    }
}

impl<'k, K> IntoIterator for &'k Keys<K> {
    type Item = &'k K;
    type IntoIter = std::collections::btree_set::Iter<'k, K>;

    fn into_iter(self) -> Self::IntoIter {
        self.keys.iter()
    }
}

impl<K: Ord + Clone> Keys<K> {
    /// Answers whether it was not there.
    pub(crate) fn insert(&mut self, key: K) -> bool {
        self.touched.note(&key);
        self.keys.insert(key)
    }

    /// Answers whether it was there.
    pub(crate) fn remove(&mut self, key: &K) -> bool {
        self.touched.note(key);
        self.keys.remove(key)
    }

    pub(crate) fn extend(&mut self, keys: impl IntoIterator<Item = K>) {
        for key in keys {
            self.insert(key);
        }
    }

    pub(crate) fn pop_first(&mut self) -> Option<K> {
        let first = self.keys.pop_first()?;
        self.touched.note(&first);
        Some(first)
    }

    pub(crate) fn retain(&mut self, mut is_kept: impl FnMut(&K) -> bool) {
        let touched = &mut self.touched;
        self.keys.retain(|key| {
            let is_kept = is_kept(key);
            if !is_kept {
                touched.note(key);
            }
            is_kept
        });
    }

    /// Takes all of them out.
    pub(crate) fn take(&mut self) -> BTreeSet<K> {
        self.touched.note_all(self.keys.iter());
        std::mem::take(&mut self.keys)
    }
}

impl<K: Ord + Clone + Serialize + DeserializeOwned> Recorded for Keys<K> {
    type Changes = RowChanges<K, ()>;

    fn start_recording(&mut self) {
        self.touched.start();
    }

    fn write_changes(&mut self, name: &str, to: &mut FieldWriter<'_>) {
        let keys = &self.keys;
        write_touched(&mut self.touched, name, to, |key, set| {
            let is_there = keys.contains(key);
            if is_there {
                set.push(&(key, ()));
            }
            is_there
        });
    }

    fn write_all(&self, name: &str, to: &mut FieldWriter<'_>) {
        let write = |set: &mut ListWriter<'_>| {
            self.keys.iter().for_each(|key| set.push(&(key, ())));
        };
        write_whole(name, to, write);
    }
}

impl<K: Ord + Clone + Serialize + DeserializeOwned> Restore for Keys<K> {
    fn restore(&mut self, changes: Self::Changes) {
        if changes.is_all {
            self.keys.clear();
        }
        for key in changes.gone {
            self.keys.remove(&key);
        }
        self.keys
            .extend(changes.set.into_iter().map(|(key, ())| key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::row_encoding::{read_rows, write_map};

    /// What is written of a collection; nothing if nothing is.
    fn read_written<C: DeserializeOwned>(
        write: impl FnOnce(&str, &mut FieldWriter<'_>),
    ) -> Option<C> {
        let mut bytes = Vec::new();
        write_map(&mut bytes, |to| write("rows", to)).then(|| {
            let mut read: BTreeMap<String, C> = read_rows(&bytes).expect("it is read");
            read.remove("rows").expect("it has its name")
        })
    }

    #[test]
    fn table_tells_each_written_row_once() {
        let mut table: Table<u32, String> = Table::default();
        table.insert(1, "before".to_owned());
        table.start_recording();
        for (key, text) in [(2, "b"), (3, "c"), (2, "d")] {
            table.insert(key, text.to_owned());
        }
        table.remove(&3);
        let changes = read_written(|name, to| table.write_changes(name, to));
        let changes: RowChanges<u32, String> = changes.expect("rows were written");
        assert_eq!(changes.set, [(2, "d".to_owned())]);
        assert_eq!(changes.gone, [3]);
        let again = read_written(|name, to| table.write_changes(name, to));
        assert_eq!(again, None::<RowChanges<u32, String>>);
        let mut other: Table<u32, String> = Table::default();
        other.insert(1, "before".to_owned());
        other.restore(changes);
        assert_eq!(other, table);
    }

    #[test]
    fn rows_of_a_snapshot_are_those_ever_written() {
        let mut rows = Rows::from(vec![0_u32; 200]);
        rows.start_recording();
        rows[3] = 7;
        rows[130] = 8;
        *rows.derived_mut(4) = 9;
        read_written::<RowChanges<u32, u32>>(|name, to| rows.write_changes(name, to));
        let all = read_written(|name, to| rows.write_all(name, to));
        let all: RowChanges<u32, u32> = all.expect("rows were written");
        assert_eq!(all.set, [(3, 7), (130, 8)]);
    }
}
