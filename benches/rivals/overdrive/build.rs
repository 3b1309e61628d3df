fn main() {
    overdrive_build::link();
}
