//! Typed attributes, with which servers describe themselves in their adverts, and constraints that
//! choose servers by them.
//!
//! The list is open: whoever runs a node adds attributes, and a later version adds values of other
//! types. A value is sent as its type's number and its bytes, so a version that does not know a
//! type passes the value through unchanged.
//!
//! A [`Constraint`] is a list of comparisons that must all hold. A comparison of an attribute that
//! is missing, or of values of different types, does not hold, whatever its operator: what is
//! unknown never matches (J. Pruyne, *Resource Management Services for Parallel Applications*,
//! 1996, section on classified ads). Integers and reals compare as numbers.
//!
//! This file does no I/O. Errors are sentences for who wrote the text.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::path::is_control_or_bidirectional;

/// Most attributes in one list.
pub const ATTRIBUTES_MAX: usize = 64;

/// Longest name of an attribute, in bytes.
pub const ATTRIBUTE_NAME_BYTES_MAX: usize = 63;

/// Longest encoded value, in bytes.
pub const ATTRIBUTE_VALUE_BYTES_MAX: usize = 1024;

/// Most comparisons in one constraint.
pub const COMPARISONS_MAX: usize = 64;

/// Names of the cooperative caches whose data a node has although no volume shows them, those used
/// last first.
pub const RETAINED_CACHES: &str = "retained_caches";

const BOOLEAN: u8 = 1;
const INTEGER: u8 = 2;
const REAL: u8 = 3;
const TEXT: u8 = 4;
const TEXT_LIST: u8 = 5;

/// The value of an attribute.
#[derive(Debug, Clone)]
pub enum AttributeValue {
    /// True or false.
    Boolean(bool),
    /// A whole number; sizes are in bytes, times in milliseconds.
    Integer(i64),
    /// A number with a fraction.
    Real(f64),
    /// Text without control characters.
    Text(String),
    /// Several texts, of which an attribute names each.
    TextList(Vec<String>),
    /// A value of a type that this version does not know, as it came.
    Unknown {
        /// Number of its type.
        kind: u8,
        /// Its bytes.
        bytes: Vec<u8>,
    },
}

impl AttributeValue {
    /// Number of its type, and its bytes.
    fn encode(&self) -> (u8, Vec<u8>) {
        match self {
            Self::Boolean(value) => (BOOLEAN, vec![u8::from(*value)]),
            Self::Integer(value) => (INTEGER, value.to_le_bytes().to_vec()),
            Self::Real(value) => (REAL, value.to_le_bytes().to_vec()),
            Self::Text(text) => (TEXT, text.as_bytes().to_vec()),
            Self::TextList(texts) => (TEXT_LIST, encode_texts(texts)),
            Self::Unknown { kind, bytes } => (*kind, bytes.clone()),
        }
    }

    /// The value; nothing when the bytes are not one of a type that is known.
    fn decode(kind: u8, bytes: Vec<u8>) -> Option<Self> {
        let value = match kind {
            BOOLEAN => match bytes[..] {
                [0] => Self::Boolean(false),
                [1] => Self::Boolean(true),
                _ => return None,
            },
            INTEGER => Self::Integer(i64::from_le_bytes(bytes.try_into().ok()?)),
            REAL => Self::Real(f64::from_le_bytes(bytes.try_into().ok()?)),
            TEXT => Self::Text(String::from_utf8(bytes).ok()?),
            TEXT_LIST => Self::TextList(decode_texts(&bytes)?),
            _ => Self::Unknown { kind, bytes },
        };
        Some(value)
    }

    /// Length of the encoded value, in bytes.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        self.encode().1.len()
    }

    /// The order of two values of one type; numbers compare with each other.
    fn compare(&self, other: &Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Boolean(left), Self::Boolean(right)) => Some(left.cmp(right)),
            (Self::Integer(left), Self::Integer(right)) => Some(left.cmp(right)),
            (Self::Text(left), Self::Text(right)) => Some(left.cmp(right)),
            (Self::TextList(left), Self::TextList(right)) => Some(left.cmp(right)),
            _ => self.as_real()?.partial_cmp(&other.as_real()?),
        }
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "a comparison with a real is no more exact than a real"
    )]
    fn as_real(&self) -> Option<f64> {
        match self {
            Self::Integer(value) => Some(*value as f64),
            Self::Real(value) => Some(*value),
            _ => None,
        }
    }

    /// Whether its texts have no control characters.
    fn is_printable(&self) -> bool {
        let is_printable = |text: &String| !text.contains(is_control_or_bidirectional);
        match self {
            Self::Text(text) => is_printable(text),
            Self::TextList(texts) => texts.iter().all(is_printable),
            _ => true,
        }
    }

    /// Whether a list has a text.
    fn contains(&self, wanted: &Self) -> bool {
        match (self, wanted) {
            (Self::TextList(texts), Self::Text(text)) => texts.contains(text),
            _ => false,
        }
    }
}

/// As what is sent: equal bytes are equal values.
impl PartialEq for AttributeValue {
    fn eq(&self, other: &Self) -> bool {
        self.encode() == other.encode()
    }
}

impl Eq for AttributeValue {}

fn encode_texts(texts: &[String]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for text in texts {
        let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
        bytes.extend(length.to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    bytes
}

fn decode_texts(mut bytes: &[u8]) -> Option<Vec<String>> {
    let mut texts = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        let (text, rest) = rest.split_at_checked(length)?;
        texts.push(String::from_utf8(text.to_vec()).ok()?);
        bytes = rest;
    }
    Some(texts)
}

impl fmt::Display for AttributeValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Boolean(value) => value.fmt(f),
            Self::Integer(value) => value.fmt(f),
            Self::Real(value) => write!(f, "{value:?}"),
            Self::Text(text) => write!(f, "{text:?}"),
            Self::TextList(texts) => write!(f, "{texts:?}"),
            Self::Unknown { kind, bytes } => {
                write!(f, "{} bytes of the unknown type {kind}", bytes.len())
            }
        }
    }
}

/// `true`, `false`, a number, or text, in double quotes or without; text without quotes that looks
/// like a number is one.
impl FromStr for AttributeValue {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Some(rest) = text.strip_prefix('"') {
            let inner = rest.strip_suffix('"').filter(|inner| !inner.contains('"'));
            let inner = inner.ok_or_else(|| format!("{text} is not one text in double quotes"))?;
            return Ok(Self::Text(inner.to_owned()));
        }
        if let Ok(value) = text.parse::<bool>() {
            return Ok(Self::Boolean(value));
        }
        if let Ok(value) = text.parse::<i64>() {
            return Ok(Self::Integer(value));
        }
        let is_number = text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '-' | '.'));
        match text.parse::<f64>() {
            Ok(value) if is_number && value.is_finite() => Ok(Self::Real(value)),
            _ if text.is_empty() => Err("a value is missing".to_owned()),
            _ => Ok(Self::Text(text.to_owned())),
        }
    }
}

/// For people (JSON) the plain value, on the wire its type's number and its bytes.
impl Serialize for AttributeValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !serializer.is_human_readable() {
            return self.encode().serialize(serializer);
        }
        match self {
            Self::Boolean(value) => value.serialize(serializer),
            Self::Integer(value) => value.serialize(serializer),
            Self::Real(value) => value.serialize(serializer),
            Self::Text(text) => text.serialize(serializer),
            Self::TextList(texts) => texts.serialize(serializer),
            Self::Unknown { .. } => serializer.serialize_unit(),
        }
    }
}

impl<'de> Deserialize<'de> for AttributeValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if deserializer.is_human_readable() {
            return PlainValue::deserialize(deserializer).map(Self::from);
        }
        let (kind, bytes) = <(u8, Vec<u8>)>::deserialize(deserializer)?;
        let value = Self::decode(kind, bytes);
        value.ok_or_else(|| D::Error::custom(format!("no attribute value of type {kind}")))
    }
}

/// A value as JSON has it.
#[derive(Deserialize)]
#[serde(untagged)]
enum PlainValue {
    Boolean(bool),
    Integer(i64),
    Real(f64),
    Text(String),
    TextList(Vec<String>),
    Unknown(()),
}

impl From<PlainValue> for AttributeValue {
    fn from(value: PlainValue) -> Self {
        match value {
            PlainValue::Boolean(value) => Self::Boolean(value),
            PlainValue::Integer(value) => Self::Integer(value),
            PlainValue::Real(value) => Self::Real(value),
            PlainValue::Text(text) => Self::Text(text),
            PlainValue::TextList(texts) => Self::TextList(texts),
            PlainValue::Unknown(()) => Self::Unknown {
                kind: 0,
                bytes: Vec::new(),
            },
        }
    }
}

/// Attributes by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Attributes(BTreeMap<String, AttributeValue>);

impl FromIterator<(String, AttributeValue)> for Attributes {
    fn from_iter<I: IntoIterator<Item = (String, AttributeValue)>>(all: I) -> Self {
        Self(all.into_iter().collect())
    }
}

impl Attributes {
    /// Sets an attribute, in place of an earlier value.
    pub fn set(&mut self, name: &str, value: AttributeValue) {
        self.0.insert(name.to_owned(), value);
    }

    /// The value of an attribute.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&AttributeValue> {
        self.0.get(name)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &AttributeValue)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value))
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether number, names and lengths are within these limits, and texts are printable.
    #[must_use]
    pub fn is_well_formed(&self) -> bool {
        let mut all = self.0.iter();
        self.0.len() <= ATTRIBUTES_MAX
            && all.all(|(name, value)| {
                let is_short = value.encoded_len() <= ATTRIBUTE_VALUE_BYTES_MAX;
                is_attribute_name(name) && is_short && value.is_printable()
            })
    }
}

/// One attribute, as a user writes it: `NAME=VALUE`.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn parse_attribute(text: &str) -> Result<(String, AttributeValue), String> {
    let (name, value) = text
        .split_once('=')
        .ok_or_else(|| format!("'{text}' is not of the form NAME=VALUE"))?;
    let name = check_attribute_name(name)?;
    let value: AttributeValue = value.parse()?;
    if value.encoded_len() > ATTRIBUTE_VALUE_BYTES_MAX {
        let limit = ATTRIBUTE_VALUE_BYTES_MAX;
        return Err(format!(
            "the value of '{name}' is longer than {limit} bytes"
        ));
    }
    if !value.is_printable() {
        return Err(format!("the value of '{name}' has control characters"));
    }
    Ok((name, value))
}

fn is_attribute_name(name: &str) -> bool {
    let is_letter = |c: char| c.is_ascii_lowercase();
    let is_inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    name.len() <= ATTRIBUTE_NAME_BYTES_MAX
        && name.starts_with(is_letter)
        && name.chars().all(is_inner)
}

fn check_attribute_name(name: &str) -> Result<String, String> {
    let name = name.trim();
    if is_attribute_name(name) {
        return Ok(name.to_owned());
    }
    Err(format!(
        "'{name}' is no name of an attribute: use up to {ATTRIBUTE_NAME_BYTES_MAX} small letters, \
         digits and '_', a letter first"
    ))
}

/// How a comparison compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operator {
    /// `==`
    Equal,
    /// `!=`
    NotEqual,
    /// `<`
    Less,
    /// `<=`
    LessOrEqual,
    /// `>`
    Greater,
    /// `>=`
    GreaterOrEqual,
    /// `contains`: a list has a text.
    Contains,
}

/// Operators as they are written, those first that begin like another.
const OPERATORS: [(&str, Operator); 7] = [
    ("==", Operator::Equal),
    ("!=", Operator::NotEqual),
    ("<=", Operator::LessOrEqual),
    (">=", Operator::GreaterOrEqual),
    ("<", Operator::Less),
    (">", Operator::Greater),
    (" contains ", Operator::Contains),
];

/// One condition on one attribute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Comparison {
    /// Which attribute.
    pub attribute: String,
    /// How it is compared.
    pub operator: Operator,
    /// With what.
    pub value: AttributeValue,
}

impl Comparison {
    /// Whether it holds for the value of its attribute.
    #[must_use]
    pub fn holds(&self, found: &AttributeValue) -> bool {
        if self.operator == Operator::Contains {
            return found.contains(&self.value);
        }
        found
            .compare(&self.value)
            .is_some_and(|order| match self.operator {
                Operator::Equal => order == Ordering::Equal,
                Operator::NotEqual => order != Ordering::Equal,
                Operator::Less => order == Ordering::Less,
                Operator::LessOrEqual => order != Ordering::Greater,
                Operator::Greater => order == Ordering::Greater,
                Operator::GreaterOrEqual => order != Ordering::Less,
                Operator::Contains => false,
            })
    }
}

/// `NAME OPERATOR VALUE`, for example `memory_bytes >= 8000000000`.
impl FromStr for Comparison {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = OPERATORS
            .iter()
            .filter_map(|(word, operator)| Some((text.find(word)?, *word, *operator)));
        // Of two at one place the longer one is meant.
        let first = found.min_by_key(|(at, word, _)| (*at, std::cmp::Reverse(word.len())));
        let Some((at, word, operator)) = first else {
            return Err(format!(
                "'{text}' is no comparison: write NAME OPERATOR VALUE with an operator of ==, !=, \
                 <, <=, >, >=, contains"
            ));
        };
        let value = &text[at + word.len()..];
        Ok(Self {
            attribute: check_attribute_name(&text[..at])?,
            operator,
            value: value.parse()?,
        })
    }
}

/// Comparisons that must all hold; without any, everything fits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Constraint(pub Vec<Comparison>);

impl Constraint {
    /// Also demands that an attribute has this value.
    #[must_use]
    pub fn and_equal(self, attribute: &str, value: &str) -> Self {
        self.and(attribute, Operator::Equal, value)
    }

    /// Also demands that a list has this text.
    #[must_use]
    pub fn and_contains(self, attribute: &str, value: &str) -> Self {
        self.and(attribute, Operator::Contains, value)
    }

    fn and(mut self, attribute: &str, operator: Operator, value: &str) -> Self {
        self.0.push(Comparison {
            attribute: attribute.to_owned(),
            operator,
            value: AttributeValue::Text(value.to_owned()),
        });
        self
    }

    /// Whether all comparisons hold; `find` gives the value of an attribute.
    pub fn is_satisfied(&self, find: impl Fn(&str) -> Option<AttributeValue>) -> bool {
        self.0.iter().all(|comparison| {
            let found = find(&comparison.attribute);
            found.is_some_and(|found| comparison.holds(&found))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;

    fn holds(text: &str, value: AttributeValue) -> bool {
        let comparison: Comparison = text.parse().expect("a comparison");
        comparison.holds(&value)
    }

    #[test]
    fn comparisons_follow_the_types_of_values() {
        let integer = AttributeValue::Integer;
        assert!(holds("memory_bytes >= 8", integer(8)));
        assert!(!holds("memory_bytes>8", integer(8)));
        assert!(holds("load < 0.5", AttributeValue::Real(0.25)));
        assert!(holds("load<1", AttributeValue::Real(0.25)));
        let text = |text: &str| AttributeValue::Text(text.to_owned());
        assert!(holds("architecture == x86_64", text("x86_64")));
        assert!(holds("architecture != \"x86_64\"", text("aarch64")));
        assert!(holds("has_gpu==true", AttributeValue::Boolean(true)));
        let list = AttributeValue::TextList(vec!["nr".to_owned(), "pdb".to_owned()]);
        assert!(holds("data_sets contains pdb", list.clone()));
        assert!(!holds("data_sets contains pd", list));
    }

    #[test]
    fn values_of_different_types_never_compare() {
        let text = AttributeValue::Text("8".to_owned());
        assert!(!holds("memory_bytes == 8", text.clone()));
        assert!(!holds("memory_bytes != 8", text));
        let not_a_number = AttributeValue::Real(f64::NAN);
        assert!(!holds("load != 1.0", not_a_number));
    }

    #[test]
    fn missing_attribute_satisfies_no_comparison() {
        let constraint = Constraint(vec!["memory_bytes != 1".parse().expect("a comparison")]);
        assert!(!constraint.is_satisfied(|_| None));
        assert!(Constraint::default().is_satisfied(|_| None));
    }

    #[test]
    fn values_of_unknown_types_pass_through() {
        let unknown = AttributeValue::Unknown {
            kind: 77,
            bytes: vec![1, 2, 3],
        };
        let mut attributes = Attributes::default();
        attributes.set("colour", unknown.clone());
        let bytes = codec::encode(&attributes).expect("encodes");
        let decoded: Attributes = codec::decode(&bytes).expect("decodes");
        assert_eq!(decoded.get("colour"), Some(&unknown));
    }

    #[test]
    fn known_values_survive_the_wire() {
        let mut attributes = Attributes::default();
        let values = [
            AttributeValue::Boolean(true),
            AttributeValue::Integer(-5),
            AttributeValue::Real(1.5),
            AttributeValue::Text("a b".to_owned()),
            AttributeValue::TextList(vec![String::new(), "é".to_owned()]),
        ];
        for (at, value) in values.into_iter().enumerate() {
            attributes.set(&format!("a{at}"), value);
        }
        let bytes = codec::encode(&attributes).expect("encodes");
        assert_eq!(codec::decode::<Attributes>(&bytes), Ok(attributes));
    }

    #[test]
    fn malformed_values_are_rejected() {
        for (kind, bytes) in [
            (BOOLEAN, vec![2]),
            (INTEGER, vec![1]),
            (TEXT, vec![0xff]),
            (TEXT_LIST, vec![9, 0, 0, 0, b'a']),
        ] {
            assert!(AttributeValue::decode(kind, bytes).is_none(), "{kind}");
        }
    }

    #[test]
    fn attribute_texts_are_checked() {
        assert_eq!(
            parse_attribute("disk=ssd"),
            Ok(("disk".to_owned(), AttributeValue::Text("ssd".to_owned())))
        );
        let numeral = parse_attribute("room=\"12\"").map(|it| it.1);
        assert_eq!(numeral, Ok(AttributeValue::Text("12".to_owned())));
        for wrong in ["disk", "Disk=ssd", "=ssd", "disk=", "d=\"a", "1d=2"] {
            assert!(parse_attribute(wrong).is_err(), "{wrong}");
        }
        assert!("memory_bytes".parse::<Comparison>().is_err());
        assert!("Memory == 1".parse::<Comparison>().is_err());
    }
}
