//! Image files on loop devices.
