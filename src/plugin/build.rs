//! Compiles the part of the plug-in that is C++: the throw of an exception that PyTorch understands.

fn main() {
    println!("cargo:rerun-if-changed=src/plugin/build.rs");
    #[cfg(feature = "plugin")]
    plugin();
}

#[cfg(feature = "plugin")]
fn plugin() {
    println!("cargo:rerun-if-changed=src/plugin/throw.cpp");
    cc::Build::new().cpp(true).std("c++17").file("src/plugin/throw.cpp").compile("fraglab_throw");
}
