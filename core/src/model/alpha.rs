//! Features of the CSI interface that are still alpha: each is served only if `--alpha` names it.

use std::str::FromStr;

/// The features that `--alpha` enables; by default none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Alpha {
    /// `health`: health of volumes and of storage, in the Controller and Node services.
    pub health: bool,
    /// `get-volume`: ControllerGetVolume.
    pub get_volume: bool,
    /// `get-snapshot`: GetSnapshot.
    pub get_snapshot: bool,
    /// `snapshot-metadata`: the SnapshotMetadata service.
    pub snapshot_metadata: bool,
    /// `snapshot-topology`: snapshots that report their topology.
    pub snapshot_topology: bool,
}

impl Alpha {
    /// The names, as in the documentation.
    pub const NAMES: [&'static str; 5] = [
        "snapshot-metadata",
        "health",
        "get-volume",
        "get-snapshot",
        "snapshot-topology",
    ];

    /// The field of a name.
    fn switch(&mut self, name: &str) -> Option<&mut bool> {
        Some(match name {
            "snapshot-metadata" => &mut self.snapshot_metadata,
            "health" => &mut self.health,
            "get-volume" => &mut self.get_volume,
            "get-snapshot" => &mut self.get_snapshot,
            "snapshot-topology" => &mut self.snapshot_topology,
            _ => return None,
        })
    }
}

/// A name that is none of [`Alpha::NAMES`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an alpha feature; known are {known}", known = Alpha::NAMES.join(", "))]
pub struct UnknownAlpha(String);

impl FromStr for Alpha {
    type Err = UnknownAlpha;
    /// Enables the one feature that is named.
    fn from_str(name: &str) -> Result<Alpha, UnknownAlpha> {
        let mut alpha = Alpha::default();
        let switch = alpha
            .switch(name)
            .ok_or_else(|| UnknownAlpha(name.to_string()))?;
        *switch = true;
        Ok(alpha)
    }
}

impl FromIterator<Alpha> for Alpha {
    /// Enables every feature that any part enables.
    fn from_iter<I: IntoIterator<Item = Alpha>>(parts: I) -> Alpha {
        parts.into_iter().fold(Alpha::default(), |a, b| Alpha {
            health: a.health | b.health,
            get_volume: a.get_volume | b.get_volume,
            get_snapshot: a.get_snapshot | b.get_snapshot,
            snapshot_metadata: a.snapshot_metadata | b.snapshot_metadata,
            snapshot_topology: a.snapshot_topology | b.snapshot_topology,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_enables_a_feature_of_its_own() {
        let parts: Vec<Alpha> = Alpha::NAMES.map(|name| name.parse().unwrap()).into();
        for (i, part) in parts.iter().enumerate() {
            assert_ne!(*part, Alpha::default());
            assert!(!parts[..i].contains(part));
        }
        let all = Alpha {
            health: true,
            get_volume: true,
            get_snapshot: true,
            snapshot_metadata: true,
            snapshot_topology: true,
        };
        assert_eq!(parts.into_iter().collect::<Alpha>(), all);
    }

    #[test]
    fn the_error_for_an_unknown_name_lists_the_known_ones() {
        let error = "helth".parse::<Alpha>().unwrap_err().to_string();
        assert!(
            error.contains("\"helth\"") && error.contains("get-volume"),
            "{error}"
        );
    }
}
