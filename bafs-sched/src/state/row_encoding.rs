//! The form in which a journal has rows of the state: MessagePack with the names of fields. Rows
//! are written while they are found, without a copy of them: lengths of maps and lists are filled
//! in at their ends. It knows no state.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// First byte of a map whose length has two bytes.
const MAP_16: u8 = 0xde;
/// First byte of a list whose length has four bytes.
const LIST_32: u8 = 0xdd;
/// First byte of a text with fewer than 32 bytes, without its length.
const SHORT_TEXT: u8 = 0xa0;
const SHORT_TEXT_BYTES_MAX: u8 = 31;

/// Writes a map of fields by name. Those without content are left out.
pub(crate) struct FieldWriter<'b> {
    bytes: &'b mut Vec<u8>,
    fields: u16,
}

/// Writes a list of elements.
pub(crate) struct ListWriter<'b> {
    bytes: &'b mut Vec<u8>,
    length: u32,
}

/// Writes a map behind these bytes, unless it has no field. Answers whether it has one.
pub(crate) fn write_map(bytes: &mut Vec<u8>, write: impl FnOnce(&mut FieldWriter<'_>)) -> bool {
    let start = bytes.len();
    bytes.extend([MAP_16, 0, 0]);
    let mut map = FieldWriter {
        bytes: &mut *bytes,
        fields: 0,
    };
    write(&mut map);
    let fields = map.fields;
    bytes[start + 1..start + 3].copy_from_slice(&fields.to_be_bytes());
    if fields == 0 {
        bytes.truncate(start);
    }
    fields > 0
}

/// Reads what was written so; else answers why it cannot.
///
/// # Errors
/// Bytes of an unknown form.
pub(crate) fn read_rows<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    rmp_serde::from_slice(bytes).map_err(|error| error.to_string())
}

impl FieldWriter<'_> {
    /// A field with this value.
    pub(crate) fn write_field<T: Serialize + ?Sized>(&mut self, name: &str, value: &T) {
        write_name(self.bytes, name);
        write_value(self.bytes, value);
        self.fields += 1;
    }

    /// A field that is a map, unless that has no field.
    pub(crate) fn write_part(&mut self, name: &str, write: impl FnOnce(&mut FieldWriter<'_>)) {
        let start = self.bytes.len();
        write_name(self.bytes, name);
        match write_map(self.bytes, write) {
            true => self.fields += 1,
            false => self.bytes.truncate(start),
        }
    }

    /// A field that is a list, unless that is empty.
    pub(crate) fn write_list(&mut self, name: &str, write: impl FnOnce(&mut ListWriter<'_>)) {
        let before = self.bytes.len();
        write_name(self.bytes, name);
        let start = self.bytes.len();
        self.bytes.extend([LIST_32, 0, 0, 0, 0]);
        let mut list = ListWriter {
            bytes: &mut *self.bytes,
            length: 0,
        };
        write(&mut list);
        let length = list.length;
        self.bytes[start + 1..start + 5].copy_from_slice(&length.to_be_bytes());
        match length {
            0 => self.bytes.truncate(before),
            _ => self.fields += 1,
        }
    }
}

impl ListWriter<'_> {
    /// Another element.
    pub(crate) fn push<T: Serialize + ?Sized>(&mut self, element: &T) {
        write_value(self.bytes, element);
        self.length += 1;
    }
}

/// Each step writes the names of all parts, and takes those back in which nothing changed.
fn write_name(bytes: &mut Vec<u8>, name: &str) {
    match u8::try_from(name.len()) {
        Ok(length) if length <= SHORT_TEXT_BYTES_MAX => {
            bytes.push(SHORT_TEXT | length);
            bytes.extend_from_slice(name.as_bytes());
        }
        _ => write_value(bytes, name),
    }
}

fn write_value<T: Serialize + ?Sized>(bytes: &mut Vec<u8>, value: &T) {
    rmp_serde::encode::write_named(bytes, value).expect("rows are plain data");
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn written_map_has_fields_with_content_alone() {
        let mut bytes = Vec::new();
        let has_fields = write_map(&mut bytes, |map| {
            map.write_field("number", &7);
            map.write_part("empty_part", |_| {});
            map.write_list("empty_list", |_| {});
            map.write_part("part", |part| {
                part.write_list("list", |list| (0..300).for_each(|at| list.push(&(at, "x"))));
            });
        });
        assert!(has_fields);
        let read: Value = read_rows(&bytes).expect("it is read");
        let list: Vec<Value> = (0..300).map(|at| json!([at, "x"])).collect();
        assert_eq!(read, json!({"number": 7, "part": {"list": list}}));
        assert!(!write_map(&mut bytes, |_| {}));
    }
}
