//! IDs: the ID of a volume is `<pool-uuid>.<volume-uuid>`, both lower-case and hyphenated.
//!
//! The UUID of a volume is version 5 of (pool, kind, request name): a retry after any crash finds
//! what the first attempt created. An ID that does not parse identifies no object, and never
//! becomes a path.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.hyphenated().fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl FromStr for $name {
            type Err = NotAnId;
            fn from_str(text: &str) -> Result<Self, NotAnId> {
                parse_uuid(text).map($name)
            }
        }
    };
}

uuid_id! {
    /// ID of a pool, written once on the pool itself.
    PoolId
}
uuid_id! {
    /// ID of the machine that owns pools: shared by all its pools, and the value of the topology
    /// segment.
    HomeId
}

uuid_id! {
    /// ID of a group of snapshots, wherever its members are.
    GroupId
}

/// A text that is not an ID of this driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an id of this driver")]
pub struct NotAnId;

/// Only the form that [`fmt::Display`] prints is accepted, so that each object has exactly one ID.
fn parse_uuid(text: &str) -> Result<Uuid, NotAnId> {
    let uuid = Uuid::try_parse(text).map_err(|_| NotAnId)?;
    let mut buffer = Uuid::encode_buffer();
    if uuid.hyphenated().encode_lower(&mut buffer) == text {
        Ok(uuid)
    } else {
        Err(NotAnId)
    }
}

/// The kind of object that a name belongs to; part of the derived UUID, so that kinds never
/// collide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameKind {
    /// The name of a CreateVolume call.
    Volume,
    /// The ID that the kubelet generates for an inline volume.
    Ephemeral,
    /// The name of a CreateSnapshot call.
    Snapshot,
    /// A member of a group: the group's id and the source's id.
    Member,
}

impl NameKind {
    fn as_str(self) -> &'static str {
        match self {
            NameKind::Volume => "volume",
            NameKind::Ephemeral => "ephemeral",
            NameKind::Snapshot => "snapshot",
            NameKind::Member => "member",
        }
    }
}

/// ID of a snapshot: its pool and its own UUID, in the format of a volume's ID. Derived UUIDs of
/// different kinds never collide, so a snapshot is never taken for a volume.
pub type SnapshotId = VolumeId;

impl GroupId {
    /// The ID of a group, from its request name and the machine.
    pub fn of_name(home: HomeId, name: &str) -> GroupId {
        GroupId(Uuid::new_v5(&home.0, format!("group\n{name}").as_bytes()))
    }
}

/// ID of a volume: its pool and its own UUID.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeId {
    /// The pool that contains it.
    pub pool: PoolId,
    /// Its own UUID; also the name of its directory on the pool.
    pub uuid: Uuid,
}

impl VolumeId {
    /// The ID of a volume, from its request name and its pool.
    pub fn of_name(pool: PoolId, kind: NameKind, name: &str) -> VolumeId {
        let text = format!("{}\n{}", kind.as_str(), name);
        VolumeId {
            pool,
            uuid: Uuid::new_v5(&pool.0, text.as_bytes()),
        }
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.pool, self.uuid.hyphenated())
    }
}

impl fmt::Debug for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for VolumeId {
    type Err = NotAnId;
    fn from_str(text: &str) -> Result<VolumeId, NotAnId> {
        let (pool, uuid) = text.split_once('.').ok_or(NotAnId)?;
        Ok(VolumeId {
            pool: pool.parse()?,
            uuid: parse_uuid(uuid)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_id_prints_and_parses_as_inverses(pool: u128, volume: u128) {
            let id = VolumeId { pool: PoolId(Uuid::from_u128(pool)), uuid: Uuid::from_u128(volume) };
            prop_assert_eq!(id.to_string().parse::<VolumeId>(), Ok(id));
        }

        #[test]
        fn every_parsed_id_prints_back_to_itself(text in "[0-9a-fA-F.{}/-]{0,80}") {
            if let Ok(id) = text.parse::<VolumeId>() {
                prop_assert_eq!(id.to_string(), text);
            }
        }

        #[test]
        fn any_text_as_id_is_refused_without_a_panic(text in any::<String>()) {
            prop_assert!(text.len() == 73 || text.parse::<VolumeId>().is_err());
        }

        #[test]
        fn names_of_any_script_get_stable_distinct_ids(pool: u128, a in "\\PC{1,64}", b in "\\PC{1,64}") {
            let pool = PoolId(Uuid::from_u128(pool));
            let id = |name: &str| VolumeId::of_name(pool, NameKind::Volume, name);
            prop_assert_eq!(id(&a), id(&a));
            prop_assert_eq!(a == b, id(&a) == id(&b));
            prop_assert_ne!(id(&a), VolumeId::of_name(pool, NameKind::Ephemeral, &a));
        }
    }

    #[test]
    fn other_spellings_of_a_uuid_are_not_ids() {
        let id = "00000000-0000-0000-0000-00000000000a.00000000-0000-0000-0000-00000000000b";
        assert!(id.parse::<VolumeId>().is_ok());
        assert!(id.to_uppercase().parse::<VolumeId>().is_err());
        assert!(id.replace('-', "").parse::<VolumeId>().is_err());
        assert!(format!("{id}.x").parse::<VolumeId>().is_err());
        assert!(format!("{id}/..").parse::<VolumeId>().is_err());
    }
}
