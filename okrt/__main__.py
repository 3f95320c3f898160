from okrt.cli.main import main

main()
